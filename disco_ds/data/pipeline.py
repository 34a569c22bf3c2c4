"""What a worker does: read, shuffle undecoded, decode, make batches. One stage per function."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from disco_ds.data.batch import Batch, Delivery, Failure
from disco_ds.data.config import DataConfig
from disco_ds.data.index import ShardIndex
from disco_ds.data.judge import Judge
from disco_ds.data.partition import Window
from disco_ds.data.planner import Planner
from disco_ds.data.reader import RawSample, ShardReader
from disco_ds.data.samples import (
    SkipSampleError,
    choose_caption,
    decode_image,
    find_image,
    random_number,
)
from disco_ds.data.state import Position

ImageTransform = Callable[[Image], Tensor]
Tokenize = Callable[[list[str]], Tensor]

MAX_SOURCES_COUNTED = 16  # users also name every shard by itself
_CAPTION, _AUGMENTATION = range(2)


@dataclass(frozen=True)
class Recipe:
    """Everything a worker needs besides its number; picklable."""

    config: DataConfig
    index: ShardIndex
    rank: int
    local_batch_size: int
    smallest_side: int | None
    image_transform: ImageTransform
    tokenize: Tokenize
    planner: Planner


def read_shuffled(
    windows: Iterator[Window], reader: ShardReader
) -> Iterator[tuple[RawSample, bool]]:
    """Yield (sample, repeated) in the windows' order, holding about one window of samples.

    While a window is handed out the next one is read at the same pace, unless its samples are
    another consumer's: those are read when they are needed.
    """
    current: list[RawSample | None] = []
    repeated = False
    for window in windows:
        size = len(window.order)
        place = np.argsort(window.order).tolist()
        arriving: list[RawSample | None] = [None] * size
        reading = enumerate(raw for segment in window.segments for raw in reader.read(segment))
        num_read = 0
        for number, sample in enumerate(current):
            assert sample is not None
            yield sample, repeated
            current[number] = None
            due = 0 if window.repeated else size * (number + 1) // len(current)
            for arrival, raw in itertools.islice(reading, due - num_read):
                arriving[place[arrival]] = raw
                num_read = arrival + 1
        for arrival, raw in reading:
            arriving[place[arrival]] = raw
        current, repeated = arriving, window.repeated


class Decoder:
    """Makes the image tensor and the caption of a raw sample."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._config = recipe.config

    def index(self, raw: RawSample) -> int:
        """The sample's id."""
        return self._recipe.index.offsets[raw.shard] + raw.position

    def decode(self, raw: RawSample, epoch: int) -> tuple[Tensor, str]:
        """Image and caption; both depend on (seed, epoch, index) alone, augmentation included.

        Raises:
            SkipSampleError: the sample cannot be used.
            RuntimeError: the user's transform failed.
        """
        if raw.problem:
            raise SkipSampleError(raw.problem)
        key = (self._recipe.planner.seed, epoch, self.index(raw))
        content = find_image(raw.members)
        caption = choose_caption(
            raw.members,
            self._config.captions,
            choice=(
                random_number(_CAPTION, *key) if self._config.caption_choice == "random" else None
            ),
            keep_empty=self._config.keep_empty_captions,
        )
        image = decode_image(
            content,
            max_pixels=self._config.max_image_pixels,
            smallest_side=self._recipe.smallest_side,
        )
        _seed_random_numbers(random_number(_AUGMENTATION, *key))
        try:
            return self._recipe.image_transform(image), caption
        except Exception as error:
            url = self._recipe.index.shards[raw.shard].url
            raise RuntimeError(
                f"image_transform failed on {raw.key} of {url}: {type(error).__name__}: {error}"
            ) from error


class SlotStream:
    """The batches of one slot in one epoch."""

    def __init__(self, recipe: Recipe, epoch: int, slot: int, position: int) -> None:
        config = recipe.config
        self.epoch, self.slot, self.position = epoch, slot, position
        self._recipe = recipe
        self._decoder = Decoder(recipe)
        self._reader = ShardReader(
            recipe.index.shards,
            suffixes={name.split(".", 1)[0] for name in config.captions},
            retries=config.read_retries,
            retry_seconds=config.retry_seconds,
            timeout=config.read_timeout,
        )
        windows = recipe.planner(epoch).windows(recipe.rank, slot, position)
        self._samples = read_shuffled(windows, self._reader)
        self._judge = Judge(
            num_samples=recipe.index.num_samples,
            captions=config.captions,
            max_bad_share=config.max_bad_share,
        )

    def next_batch(self, step: int) -> Delivery:
        """Gather usable samples, skipping and counting the others.

        Raises:
            ValueError: too many samples are bad.
        """
        counts: Counter[str] = Counter()
        images: list[Tensor] = []
        captions: list[str] = []
        indices: list[int] = []
        with _private_random_numbers():
            while len(images) < self._recipe.local_batch_size:
                raw, repeated = next(self._samples)
                self.position += 1
                try:
                    image, caption = self._decoder.decode(raw, self.epoch)
                except SkipSampleError as skip:
                    if not repeated:  # else its own consumer counts it
                        self._count(counts, f"skipped_{skip.reason}", raw)
                    self._judge.skipped(skip.reason, raw.suffixes, repeated=repeated)
                    continue
                self._count(counts, "repeated" if repeated else "seen", raw)
                self._judge.used(repeated=repeated)
                images.append(image)
                captions.append(caption)
                indices.append(self._decoder.index(raw))
        batch = Batch(
            torch.stack(images),
            self._recipe.tokenize(captions).long(),
            torch.tensor(indices, dtype=torch.int64),
        )
        return Delivery(batch, self.epoch, step, self.position, dict(counts))

    def close(self) -> None:
        """Close the open shard."""
        self._reader.close()

    def _count(self, counts: Counter[str], what: str, raw: RawSample) -> None:
        counts[what] += 1
        if 1 < len(self._recipe.config.shards) <= MAX_SOURCES_COUNTED:
            counts[f"source{self._recipe.index.shards[raw.shard].source}/{what}"] += 1


class BatchDataset(IterableDataset[Delivery | Failure]):
    """The endless batches of one rank, dealt out over its workers in turn."""

    def __init__(self, recipe: Recipe, start: Position) -> None:
        self._recipe = recipe
        self._start = start

    def __iter__(self) -> Iterator[Delivery | Failure]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:  # see the loader; a fork server does not hand the setting down
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            yield from self._deliver(worker, num_workers)
        except Exception as error:
            is_data_error = isinstance(error, ValueError)
            text = str(error) if is_data_error else f"{type(error).__name__}: {error}"
            yield Failure(text, traceback.format_exc(), is_data_error)

    def _deliver(self, worker: int, num_workers: int) -> Iterator[Delivery]:
        stream: SlotStream | None = None
        try:
            for epoch, step in itertools.islice(self._schedule(), worker, None, num_workers):
                slot = step % num_workers
                if stream is None or (stream.epoch, stream.slot) != (epoch, slot):
                    if stream is not None:
                        stream.close()
                    position = self._start.positions[slot] if epoch == self._start.epoch else 0
                    stream = SlotStream(self._recipe, epoch, slot, position)
                yield stream.next_batch(step)
        finally:
            if stream is not None:
                stream.close()

    def _schedule(self) -> Iterator[tuple[int, int]]:
        """(epoch, step) of every batch of the rank from the start on."""
        step = self._start.step
        for epoch in itertools.count(self._start.epoch):
            yield from ((epoch, s) for s in range(step, self._recipe.planner(epoch).num_steps))
            step = 0


@contextlib.contextmanager
def _private_random_numbers() -> Iterator[None]:
    """Leave the global generators as they were: without workers they are the training's."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed_random_numbers(number: int) -> None:
    """Seed every generator that transforms draw from."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)
