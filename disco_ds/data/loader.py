"""The training stream of one rank: batches with sample ids, exact, equal on all ranks, resumable.

The rules (who reads what) are in :mod:`disco_ds.data.partition`; here they meet worker processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from disco_ds.data.config import DataConfig
from disco_ds.data.index import ShardIndex
from disco_ds.data.partition import (
    EpochPlan,
    ExactPlan,
    ResampledPlan,
    Stretch,
    Topology,
    draw_chances,
)
from disco_ds.data.pipeline import (
    Batch,
    BatchDataset,
    Delivery,
    Failure,
    ImageTransform,
    Recipe,
    Start,
    Tokenize,
    check_bad_share,
)
from disco_ds.distributed import World

__all__ = ["Batch", "DataConfig", "TrainLoader", "check_feed"]

logger = logging.getLogger(__name__)

STATE_FORMAT = 1
ALL_RANKS = -1
State = dict[str, Any]


@dataclass(frozen=True)
class _Planner:
    """Makes the plan of any epoch; picklable."""

    config: DataConfig
    sizes: tuple[int, ...]
    sources: tuple[int, ...]
    seed: int
    topology: Topology
    history_epoch: int = 0
    history: tuple[Stretch, ...] = ()
    """What other topologies consumed of ``history_epoch``."""
    num_samples_before: int = 0
    """How many samples that were."""

    def __call__(self, epoch: int) -> EpochPlan:
        resumed = epoch == self.history_epoch
        history = self.history if resumed else ()
        if self.config.mode == "exact":
            return ExactPlan(
                self.sizes,
                seed=self.seed,
                epoch=epoch,
                topology=self.topology,
                history=history,
            )
        weights = self.config.weights or _natural_weights(self.sizes, self.sources)
        return ResampledPlan(
            self.sizes,
            seed=self.seed,
            epoch=epoch,
            topology=self.topology,
            chances=draw_chances(self.sizes, self.sources, weights),
            history=history,
            num_samples_before=self.num_samples_before if resumed else 0,
        )


def _natural_weights(sizes: Sequence[int], sources: Sequence[int]) -> list[float]:
    """Each source by its size."""
    weights = [0.0] * (max(sources) + 1)
    for size, source in zip(sizes, sources, strict=True):
        weights[source] += size
    return weights


class TrainLoader:
    """Endless batches of one rank over epochs; every rank takes the same number of steps.

    Guarantees in exact mode: within an epoch no sample is handed out twice and less than one
    global batch stays unseen, as long as no sample is bad. A bad sample is skipped and counted;
    a rank that comes up short by it goes on with samples of other ranks, counted as repeated.
    What is handed out, augmentation included, depends on the seed, the data and the topology
    (ranks, workers, batch size), never on timing.
    """

    def __init__(
        self,
        config: DataConfig,
        index: ShardIndex,
        *,
        world: World,
        local_batch_size: int,
        image_transform: ImageTransform,
        tokenize: Tokenize,
        seed: int,
        image_size: int | None = None,
    ) -> None:
        """Check that the data can feed all ranks; start nothing yet.

        Args:
            config: the user's settings.
            index: all shards of the data set, the same on all ranks.
            world: place of this rank.
            local_batch_size: rows of every batch.
            image_transform: RGB image to ``[3, S, S]`` float32; runs in the workers.
            tokenize: captions to ``[b, context]`` token ids; runs in the workers.
            seed: decides order, augmentation and choice of captions.
            image_size: S; lets JPEGs be decoded at reduced size (``config.reduced_decode``).

        Raises:
            ValueError: the data cannot fill one global batch, or is not the data asked for.
        """
        self._config = config
        self._index = index
        self._world = world
        self._topology = _topology(config, world, local_batch_size)
        _check_feed(config, index, self._topology)
        self.num_samples = index.num_samples
        self.steps_per_epoch = self._topology.num_steps(index.num_samples)
        reduced = image_size is not None and config.reduced_decode > 0
        planner = _Planner(
            config,
            index.sizes,
            tuple(shard.source for shard in index.shards),
            seed,
            self._topology,
        )
        self._recipe = Recipe(
            config=config,
            index=index,
            rank=world.rank,
            local_batch_size=local_batch_size,
            smallest_side=round(config.reduced_decode * (image_size or 0)) if reduced else None,
            image_transform=image_transform,
            tokenize=tokenize,
            seed=seed,
            plan=planner,
        )
        self._position = Start(0, 0, (0,) * self._topology.num_slots)
        self._plan = planner(0)
        self._counts: Counter[str] = Counter()
        self._iterator: Iterator[Delivery | Failure] | None = None

    @property
    def epoch(self) -> float:
        """Epochs up to and including the last batch that was handed out."""
        before = self._plan.num_samples_before / self.num_samples
        share = self._position.step / max(1, self._plan.num_steps)
        return self._position.epoch + before + (1 - before) * share

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the present position on, without end.

        Raises:
            ValueError: the data is too bad to go on (see ``config.max_bad_share``).
            RuntimeError: a worker failed or was killed.
        """
        self.close()
        with _quiet_tokenizers():
            self._iterator = iter(self._data_loader())
        while self._iterator is not None:
            delivery = _next(self._iterator)
            if delivery.epoch != self._position.epoch:
                self._counts.clear()
                self._position = Start(delivery.epoch, 0, (0,) * self._topology.num_slots)
                self._plan = self._planner(delivery.epoch)
            self._counts.update(delivery.counts)
            positions = list(self._position.positions)
            positions[delivery.step % self._topology.num_slots] = delivery.position
            self._position = Start(delivery.epoch, delivery.step + 1, tuple(positions))
            self._check_bad_share()
            yield delivery.batch

    def epoch_summary(self) -> dict[str, float]:
        """What became of this rank's samples in the epoch of the last batch; sum over ranks.

        ``data/seen``, ``data/repeated``, ``data/unseen``, ``data/skipped_<reason>``; with several
        sources also ``data/source<i>/...``. In resampled mode only what was drawn is counted.
        """
        summary = {f"data/{name}": float(count) for name, count in self._counts.items()}
        if self._config.mode == "exact":
            names = [name for name in self._counts if name.startswith(("seen", "skipped_"))]
            own = self._plan.num_own_samples(self._world.rank)
            if self._world.is_main:  # whose counts include those of earlier topologies
                own += self._plan.num_samples_before
            summary["data/unseen"] = float(own - sum(self._counts[name] for name in names))
            summary.setdefault("data/repeated", 0.0)
        summary.setdefault("data/seen", 0.0)
        return summary

    def state_dict(self) -> State:
        """Plain values: the position after the last batch that was handed out.

        Prefetched batches do not count. Each rank has its own; to resume on another number of
        ranks, pass all of them to :meth:`merge_states`.
        """
        planner = self._planner
        resumed = planner.history_epoch == self._position.epoch
        return {
            "format": STATE_FORMAT,
            "fingerprint": self._index.fingerprint,
            "mode": self._config.mode,
            "seed": planner.seed,
            "rank": self._world.rank,
            "epoch": self._position.epoch,
            "step": self._position.step,
            "topology": _pack_topology(self._topology),
            "positions": list(self._position.positions),
            "history": _pack_history(planner.history if resumed else ()),
            "num_samples_before": planner.num_samples_before if resumed else 0,
            **{f"count/{name}": count for name, count in sorted(self._counts.items())},
        }

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
        """One state, good for any rank of any topology, from the states of all ranks.

        Raises:
            ValueError: they are not of one moment.
        """
        ordered = sorted(states, key=lambda state: int(state["rank"]))
        first = ordered[0]
        common = ("fingerprint", "mode", "seed", "epoch", "step", "topology", "history")
        if [state["rank"] for state in ordered] != list(range(first["topology"][0])) or any(
            state[name] != first[name] for state in ordered for name in common
        ):
            raise ValueError("these are not the states of all ranks at one step")
        counts: Counter[str] = Counter()
        for state in ordered:
            counts.update(_counts(state))
        positions = [position for state in ordered for position in state["positions"]]
        kept = {name: value for name, value in first.items() if not name.startswith("count/")}
        totals = {f"count/{name}": count for name, count in sorted(counts.items())}
        return {**kept, "rank": ALL_RANKS, "positions": positions, **totals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that a state was taken at.

        With the same ranks, workers and batch size: the same ids in the same order. Otherwise
        what is left of the epoch is dealt out anew, without a repeat.

        Raises:
            ValueError: the state belongs to other data, another seed or mode, or to one rank of
                several when the topology has changed.
        """
        _check_state(state, self._index, self._config, self._planner.seed)
        self.close()
        topology = _unpack_topology(state["topology"])
        history = _unpack_history(state["history"])
        positions = tuple(int(p) for p in state["positions"])
        start = Start(int(state["epoch"]), int(state["step"]), ())
        before = int(state["num_samples_before"])
        complete = state["rank"] == ALL_RANKS or topology.world_size == 1
        counts = _counts(state)
        slots = self._topology.num_slots
        if topology == self._topology and (complete or state["rank"] == self._world.rank):
            if complete:
                positions = positions[self._world.rank * slots : (self._world.rank + 1) * slots]
            start = replace(start, positions=positions)
        elif not complete:
            raise ValueError(
                f"the data position is rank {state['rank']}'s of {topology.world_size} ranks with "
                f"{topology.num_slots} workers; this is rank {self._world.rank} of "
                f"{self._world.world_size} with {slots}. Resume from the states of all ranks "
                "(TrainLoader.merge_states), or with the former ranks, workers and batch size"
            )
        else:
            history = (*history, Stretch(topology, positions))
            before += start.step * topology.world_size * topology.local_batch_size
            start = Start(start.epoch, 0, (0,) * slots)
        if complete and not self._world.is_main:
            counts = Counter()  # the main rank carries everybody's
        planner = replace(
            self._planner, history_epoch=start.epoch, history=history, num_samples_before=before
        )
        self._recipe = replace(self._recipe, plan=planner)
        self._position, self._counts, self._plan = start, counts, planner(start.epoch)

    def close(self) -> None:
        """Stop the workers; iterating again starts new ones at the present position."""
        self._iterator = None

    def _check_bad_share(self) -> None:
        """Judge after a thousand samples, or when the epoch is over."""
        is_over = self._position.step == self._plan.num_steps
        enough = {"at_least": 1} if is_over else {}
        check_bad_share(self._counts, self._config.max_bad_share, **enough)

    @property
    def _planner(self) -> _Planner:
        return cast("_Planner", self._recipe.plan)

    def _data_loader(self) -> DataLoader[Delivery | Failure]:
        workers = self._config.num_workers
        return DataLoader(
            BatchDataset(self._recipe, self._position),
            batch_size=None,
            num_workers=workers,
            collate_fn=_unchanged,
            prefetch_factor=self._config.prefetch_batches if workers else None,
            multiprocessing_context=self._config.start_method if workers else None,
            pin_memory=self._world.device.type == "cuda",
            # Its own generator: drawing the workers' seeds must not move the training's.
            generator=torch.Generator(),
        )


def _next(iterator: Iterator[Delivery | Failure]) -> Delivery:
    try:
        item = next(iterator)
    except RuntimeError as error:  # the DataLoader's word for a worker that died
        line = str(error).splitlines()[0]
        raise RuntimeError(f"a data worker died: {line} (out of memory?)") from error
    if isinstance(item, Delivery):
        return item
    logger.debug("%s", item.details)
    if item.is_data_error:
        raise ValueError(item.message)
    raise RuntimeError(f"a data worker failed: {item.message}")


def _unchanged(item: Any) -> Any:
    return item


@contextlib.contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Tell a Rust tokenizer not to use threads in forked workers, unless the user has decided.

    It reads the variable at the moment of the fork, so it must be set around it.
    """
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]


def check_feed(
    config: DataConfig, index: ShardIndex, *, world: World, local_batch_size: int
) -> None:
    """Refuse data that cannot feed a run, without a model or a worker.

    Raises:
        ValueError: the data cannot fill one global batch, or is not the data asked for.
    """
    _check_feed(config, index, _topology(config, world, local_batch_size))


def _topology(config: DataConfig, world: World, local_batch_size: int) -> Topology:
    return Topology(
        world_size=world.world_size,
        num_slots=max(1, config.num_workers),
        local_batch_size=local_batch_size,
        window=max(1, config.shuffle_buffer),
    )


def _check_feed(config: DataConfig, index: ShardIndex, topology: Topology) -> None:
    if topology.local_batch_size < 1:
        raise ValueError(f"local_batch_size={topology.local_batch_size}: must be at least 1")
    if config.num_samples is not None and config.num_samples != index.num_samples:
        raise ValueError(
            f"data.num_samples={config.num_samples}, but the shards hold {index.num_samples}"
        )
    global_batch_size = topology.world_size * topology.local_batch_size
    if index.num_samples < global_batch_size:
        raise ValueError(
            f"{index.num_samples} samples in {len(index.shards)} shards cannot fill one global "
            f"batch of {global_batch_size} ({topology.world_size} ranks x "
            f"{topology.local_batch_size}): use a smaller batch, fewer ranks or more data"
        )
    num_consumers = topology.world_size * topology.num_slots
    filled = sum(size > 0 for size in index.sizes)
    if filled < num_consumers:
        logger.warning(
            "%d shards for %d consumers (%d ranks x %d workers): shards are read by several. "
            "More shards, fewer workers or data.mode=resampled avoid that",
            *(filled, num_consumers, topology.world_size, topology.num_slots),
        )


def _check_state(
    state: Mapping[str, Any], index: ShardIndex, config: DataConfig, seed: int
) -> None:
    if state.get("format") != STATE_FORMAT:
        raise ValueError(f"data position of format {state.get('format')}, not {STATE_FORMAT}")
    expected = {"fingerprint": index.fingerprint, "mode": config.mode, "seed": seed}
    for name, value in expected.items():
        if state[name] != value:
            raise ValueError(
                f"cannot resume inside the epoch: {name} of the data was {state[name]}, "
                f"now it is {value}"
            )


def _counts(state: Mapping[str, Any]) -> Counter[str]:
    prefix = "count/"
    return Counter(
        {name.removeprefix(prefix): int(v) for name, v in state.items() if name.startswith(prefix)}
    )


def _pack_topology(topology: Topology) -> list[int]:
    return [
        topology.world_size,
        topology.num_slots,
        topology.local_batch_size,
        topology.window,
    ]


def _unpack_topology(numbers: Sequence[int]) -> Topology:
    return Topology(*(int(number) for number in numbers))


def _pack_history(history: Sequence[Stretch]) -> list[int]:
    return [n for s in history for n in (*_pack_topology(s.topology), *s.positions)]


def _unpack_history(numbers: Sequence[int]) -> tuple[Stretch, ...]:
    stretches, rest = [], [int(number) for number in numbers]
    while rest:
        topology = _unpack_topology(rest[:4])
        end = 4 + topology.world_size * topology.num_slots
        stretches.append(Stretch(topology, tuple(rest[4:end])))
        rest = rest[end:]
    return tuple(stretches)
