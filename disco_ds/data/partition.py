"""Who reads which samples of an epoch, and in which order: pure functions of a few numbers.

The shards of an epoch, in an order drawn from (seed, epoch), are laid end to end as one *line* of
N samples. The line is cut into equal parts, one per consumer, a consumer being one worker *slot*
of one rank::

    line      |--- shard 5 ---|-- shard 0 --|---- shard 7 ----|-- shard 2 --| ...
    rank      [------------- rank 0 -------------)[----------- rank 1 ------- ...
    slot      [---- slot 0 ----)[---- slot 1 ----)[---- slot 0 ----)[-- slot 1 ...
    window    [-)[--)[----)[---) ...                samples are shuffled inside each window

- Every rank takes ``N // (world_size * local_batch_size)`` steps; batch ``t`` of a rank is made
  by slot ``t % num_slots``. What is left over, less than one global batch, is not seen.
- A shard that lies across a cut is read by both neighbours, each its own samples. Shards that
  divide evenly are never cut.
- A consumer that finds bad samples in its part takes the next ones; when its part is used up it
  *reads on* into the parts that follow (round the line if need be). Only those are repeats.
- The *position* of a consumer is how many samples of its order it has gone through, bad ones
  included. Positions are all there is to resume from; windows behind a position are never read.
- After a change of topology inside an epoch the line is what nobody has gone through yet.

Glossary: sizes = samples per shard; offset = place on the line; segment = a piece of one shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Range = tuple[int, int]

# First words of the seed sequences, so that no two uses share random numbers.
_SHARD_ORDER, _WINDOW_ORDER, _DRAWS = range(3)
_FIRST_WINDOW_SHARE = 8


@dataclass(frozen=True)
class Segment:
    """Samples ``start`` up to ``stop`` (exclusive) of shard number ``shard``."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class Topology:
    """Everything outside the data that decides who reads what."""

    world_size: int
    num_slots: int
    """Consumers per rank: its workers, or 1 without workers."""
    local_batch_size: int
    window: int
    """Samples shuffled among each other, per consumer."""

    def num_steps(self, num_samples: int) -> int:
        """Steps that every rank takes over ``num_samples`` samples."""
        return num_samples // (self.world_size * self.local_batch_size)


@dataclass(frozen=True)
class Stretch:
    """What one topology consumed of an epoch before another took over."""

    topology: Topology
    positions: tuple[int, ...]
    """One per consumer, rank by rank."""


@dataclass(frozen=True)
class Window:
    """A few segments, and the order in which their samples come out."""

    segments: tuple[Segment, ...]
    order: tuple[int, ...]
    """``order[i]`` counts samples in reading order: what comes out ``i``-th."""
    repeated: bool
    """The samples belong to another consumer's part."""


class Line(Protocol):
    """Samples of many shards, numbered by offset."""

    def segments(self, start: int, stop: int) -> list[Segment]:
        """The pieces of shards between two offsets."""


class ShardLine:
    """All shards of an epoch end to end, or the intervals of it that remain to be read."""

    def __init__(self, sizes: Sequence[int], order: Ints, kept: Ints | None = None) -> None:
        """``kept``: ``[m, 2]`` rising intervals of offsets; by default the whole line."""
        self._order = order
        self._bounds = _cumulative(np.asarray(sizes, dtype=np.int64)[order])
        if kept is None:
            kept = np.array([[0, self._bounds[-1]]], dtype=np.int64)
        self._kept = kept
        self._kept_bounds = _cumulative(kept[:, 1] - kept[:, 0])

    @property
    def num_samples(self) -> int:
        """Samples on the line."""
        return int(self._kept_bounds[-1])

    def intervals(self, start: int, stop: int) -> Iterator[Range]:
        """The same samples as offsets of the whole epoch's line."""
        for number, low, high in _pieces(self._kept_bounds, start, stop):
            first = int(self._kept[number, 0])
            yield first + low, first + high

    def segments(self, start: int, stop: int) -> list[Segment]:
        """The pieces of shards between two offsets."""
        return [
            Segment(int(self._order[number]), low, high)
            for interval in self.intervals(start, stop)
            for number, low, high in _pieces(self._bounds, *interval)
        ]

    def less(self, kept: Iterable[Range]) -> Ints:
        """The intervals, on the whole epoch's line, of some ranges of this line."""
        intervals = [part for low, high in kept for part in self.intervals(low, high)]
        return np.array(intervals, dtype=np.int64).reshape(-1, 2)


class DrawnLine:
    """An endless line of shards drawn with replacement."""

    def __init__(self, sizes: Sequence[int], chances: Sequence[float], key: Sequence[int]) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._chances = np.asarray(chances, dtype=np.float64)
        self._rng = np.random.default_rng([_DRAWS, *key])
        self._drawn: Ints = np.zeros(0, dtype=np.int64)
        self._bounds: Ints = np.zeros(1, dtype=np.int64)

    def segments(self, start: int, stop: int) -> list[Segment]:
        """The pieces of shards between two offsets."""
        while self._bounds[-1] < stop:
            more = self._rng.choice(len(self._sizes), size=256, p=self._chances)
            self._drawn = np.concatenate([self._drawn, more.astype(np.int64)])
            self._bounds = _cumulative(self._sizes[self._drawn])
        return [
            Segment(int(self._drawn[number]), low, high)
            for number, low, high in _pieces(self._bounds, start, stop)
        ]


def shard_order(num_shards: int, seed: int, epoch: int) -> Ints:
    """The order of the shards in an epoch: the same on all ranks, another in each epoch."""
    return np.random.default_rng([_SHARD_ORDER, seed, epoch]).permutation(num_shards)


def consumer_range(num_samples: int, topology: Topology, rank: int, slot: int) -> Range:
    """The part of the line of one consumer: enough for all batches of its slot.

    Ranks differ by one sample at most; the slots of a rank by one batch.
    """
    size = topology.local_batch_size
    low, high = (num_samples * (rank + extra) // topology.world_size for extra in (0, 1))
    steps = topology.num_steps(num_samples)
    surplus = high - low - steps * size
    starts = (
        low
        + size * _batches_before(steps, topology.num_slots, s)
        + surplus * s // topology.num_slots
        for s in (slot, slot + 1)
    )
    start, stop = starts
    return start, stop


def _batches_before(steps: int, num_slots: int, slot: int) -> int:
    """Batches of the slots before ``slot`` when batch t goes to slot ``t % num_slots``."""
    return steps // num_slots * slot + min(slot, steps % num_slots)


def window_ranges(start: int, stop: int, size: int, *, ramp: bool = True) -> Iterator[Range]:
    """Cut a range into windows of ``size``; the first ones are smaller, to start sooner."""
    length = max(1, size // _FIRST_WINDOW_SHARE) if ramp else size
    while start < stop:
        yield start, min(start + length, stop)
        start += length
        length = min(2 * length, size)


def window_order(num_samples: int, key: Sequence[int]) -> Ints:
    """The order in which the samples of a window come out."""
    return np.random.default_rng([_WINDOW_ORDER, *key]).permutation(num_samples)


def consumer_windows(
    line: Line,
    ranges: Iterable[tuple[int, int, bool]],
    key: Sequence[int],
    position: int,
) -> Iterator[Window]:
    """The windows of one consumer from a position on, without what lies behind it.

    ``ranges`` holds (start, stop, repeated) per window; ``key`` is unique to this consumer.
    """
    for number, (start, stop, repeated) in enumerate(ranges):
        if position >= stop - start:
            position -= stop - start
            continue
        order = window_order(stop - start, [*key, number])[position:]
        position = 0
        wanted = np.sort(order)
        segments = [
            s for low, high in _runs(wanted) for s in line.segments(start + low, start + high)
        ]
        ranks = np.searchsorted(wanted, order)
        yield Window(tuple(segments), tuple(ranks.tolist()), repeated)


def unread_ranges(ranges: Iterable[Range], key: Sequence[int], position: int) -> Iterator[Range]:
    """The parts of a consumer's own windows that a position has not gone through."""
    for number, (start, stop) in enumerate(ranges):
        if position >= stop - start:
            position -= stop - start
            continue
        order = window_order(stop - start, [*key, number])[position:]
        position = 0
        yield from ((start + low, start + high) for low, high in _runs(np.sort(order)))


class EpochPlan(Protocol):
    """One epoch under one topology."""

    num_steps: int
    """Steps of every rank."""
    num_samples_before: int
    """Samples of the epoch that other topologies went through."""

    def windows(self, rank: int, slot: int, position: int) -> Iterator[Window]:
        """What a consumer reads from a position on; endless."""

    def num_own_samples(self, rank: int) -> int:
        """Samples in the part of a rank."""


class ExactPlan:
    """Every sample once, apart from less than one global batch that stays unseen."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        seed: int,
        epoch: int,
        topology: Topology,
        history: Sequence[Stretch] = (),
    ) -> None:
        self._topology = topology
        self._key = (seed, epoch, len(history))
        order = shard_order(len(sizes), seed, epoch)
        whole = line = ShardLine(sizes, order)
        for generation, stretch in enumerate(history):
            kept = line.less(_unread(line.num_samples, stretch, (seed, epoch, generation)))
            line = ShardLine(sizes, order, kept)
        self._line = line
        self.num_steps = topology.num_steps(line.num_samples)
        self.num_samples_before = whole.num_samples - line.num_samples

    def windows(self, rank: int, slot: int, position: int) -> Iterator[Window]:
        """What a consumer reads from a position on: its own part, then round the line."""
        total = self._line.num_samples
        low, high = consumer_range(total, self._topology, rank, slot)
        size = self._topology.window
        own = ((*r, False) for r in window_ranges(low, high, size))
        onward = itertools.cycle([(high, total), (0, low), (low, high)])
        others = (
            (*window, True) for part in onward for window in window_ranges(*part, size, ramp=False)
        )
        return consumer_windows(
            self._line, itertools.chain(own, others), (*self._key, rank, slot), position
        )

    def num_own_samples(self, rank: int) -> int:
        """Samples in the part of a rank."""
        total, world_size = self._line.num_samples, self._topology.world_size
        return total * (rank + 1) // world_size - total * rank // world_size


def _unread(num_samples: int, stretch: Stretch, key: Sequence[int]) -> Iterator[Range]:
    topology = stretch.topology
    for consumer, position in enumerate(stretch.positions):
        rank, slot = divmod(consumer, topology.num_slots)
        part = consumer_range(num_samples, topology, rank, slot)
        windows = window_ranges(*part, topology.window)
        yield from unread_ranges(windows, (*key, rank, slot), position)


class ResampledPlan:
    """Shards drawn with replacement, each consumer its own; an epoch is as long as in exact mode.

    ``chances``: probability of each shard at every draw.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        seed: int,
        epoch: int,
        topology: Topology,
        chances: Sequence[float],
        history: Sequence[Stretch] = (),
        num_samples_before: int = 0,
    ) -> None:
        self._sizes, self._chances, self._topology = sizes, chances, topology
        self._key = (seed, epoch, len(history))
        total = sum(sizes)
        self.num_samples_before = min(num_samples_before, total)
        self.num_steps = topology.num_steps(total - self.num_samples_before)

    def windows(self, rank: int, slot: int, position: int) -> Iterator[Window]:
        """What a consumer reads from a position on; endless."""
        key = (*self._key, rank, slot)
        line = DrawnLine(self._sizes, self._chances, key)
        endless = window_ranges(0, 2**62, self._topology.window)
        return consumer_windows(line, ((*r, False) for r in endless), key, position)

    def num_own_samples(self, rank: int) -> int:
        """Samples that a rank draws in the epoch."""
        return self.num_steps * self._topology.local_batch_size


def draw_chances(
    sizes: Sequence[int], sources: Sequence[int], weights: Sequence[float]
) -> list[float]:
    """Probability of each shard such that source ``i`` gives a share ``weights[i]`` of samples.

    Inside a source all shards are equally likely. Empty shards are never drawn.
    """
    chances = np.zeros(len(sizes))
    size, source = np.asarray(sizes), np.asarray(sources)
    for number, weight in enumerate(weights):
        filled = (source == number) & (size > 0)
        if weight > 0 and not filled.any():
            raise ValueError(
                f"data.weights gives {weight:g} to entry {number + 1} of data.shards, which holds "
                "no samples"
            )
        if weight > 0:
            chances[filled] = weight / size[filled].sum()
    return [float(c) for c in chances / chances.sum()]


def _cumulative(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def _pieces(bounds: Ints, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(number, low, high) of the boxes between ``bounds`` that a range falls into."""
    number = int(np.searchsorted(bounds, start, side="right")) - 1
    while start < stop:
        first, end = int(bounds[number]), int(bounds[number + 1])
        high = min(stop, end)
        if high > start:
            yield number, start - first, high - first
            start = high
        number += 1


def _runs(rising: Ints) -> Iterator[Range]:
    """Consecutive numbers as half-open ranges."""
    breaks = np.flatnonzero(np.diff(rising) != 1) + 1
    edges = [0, *breaks.tolist(), len(rising)]
    for first, last in itertools.pairwise(edges):
        yield int(rising[first]), int(rising[last - 1]) + 1
