"""The training stream of one rank: batches with sample ids, exact, equal on all ranks, resumable.

The rules (who reads what) are in :mod:`disco_ds.data.partition`; here they meet worker processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from disco_ds.data.batch import Batch, DataWorkerError, Delivery, Failure
from disco_ds.data.config import DataConfig
from disco_ds.data.index import ShardIndex
from disco_ds.data.judge import check_bad_share
from disco_ds.data.partition import Stretch, Topology, draw_chances
from disco_ds.data.pipeline import BatchDataset, ImageTransform, Recipe, Tokenize
from disco_ds.data.planner import Planner, make_topology
from disco_ds.data.shared_memory import warn_if_little
from disco_ds.data.state import LoaderState, Position, State, merge_states
from disco_ds.data.workers import Arrivals, start_workers
from disco_ds.distributed import World
from disco_ds.preemption import shielded_children

__all__ = ["Batch", "DataConfig", "TrainLoader", "check_feed"]

logger = logging.getLogger(__name__)


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
        check_feed(config, index, world=world, local_batch_size=local_batch_size)
        topology = make_topology(config, world, local_batch_size)
        if world.is_main:
            _warn_of_few_shards(index, topology)
            if image_size is not None:
                warn_if_little(config, batch_size=local_batch_size, image_size=image_size)
        self.num_samples = index.num_samples
        self.steps_per_epoch = topology.num_steps(index.num_samples)
        self._recipe = Recipe(
            config=config,
            index=index,
            rank=world.rank,
            local_batch_size=local_batch_size,
            smallest_side=_smallest_side(config, image_size),
            image_transform=image_transform,
            tokenize=tokenize,
            planner=Planner.create(config, index, topology=topology, seed=seed),
        )
        self._position = Position(0, 0, (0,) * topology.num_slots)
        self._plan = self._recipe.planner(0)
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
            DataWorkerError: a worker failed or was killed.
        """
        self.close()
        with _quiet_tokenizers(), shielded_children():
            self._iterator = start_workers(
                self._data_loader,
                self._config.num_workers,
                is_fork=self._config.start_method == "fork",
            )
        while self._iterator is not None:
            try:
                delivery = _next(self._iterator)
                self._advance(delivery)
            except (ValueError, RuntimeError):
                self.close()
                raise
            yield delivery.batch

    def _advance(self, delivery: Delivery) -> None:
        """Note that a batch is handed out."""
        num_slots = self._recipe.planner.topology.num_slots
        if delivery.epoch != self._position.epoch:
            self._counts.clear()
            self._position = Position(delivery.epoch, 0, (0,) * num_slots)
            self._plan = self._recipe.planner(delivery.epoch)
        self._counts.update(delivery.counts)
        positions = list(self._position.positions)
        positions[delivery.step % num_slots] = delivery.position
        self._position = Position(delivery.epoch, delivery.step + 1, tuple(positions))
        is_over = self._position.step == self._plan.num_steps
        limit = self._config.max_bad_share
        check_bad_share(self._counts, limit, **({"at_least": 1} if is_over else {}))

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
        planner = self._recipe.planner
        resumed = planner.history_epoch == self._position.epoch
        return LoaderState(
            fingerprint=self._index.fingerprint,
            mode=planner.mode,
            seed=planner.seed,
            rank=self._world.rank,
            topology=planner.topology,
            position=self._position,
            history=planner.history if resumed else (),
            num_samples_before=planner.num_samples_before if resumed else 0,
            counts=self._counts,
        ).to_plain()

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
        """One state, good for any rank of any topology, from the states of all ranks.

        Raises:
            ValueError: they are not the states of all ranks after one step.
        """
        return merge_states(states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch that a state was taken at.

        With the same ranks, workers and batch size: the same ids in the same order. Otherwise
        what is left of the epoch is dealt out anew, without a repeat.

        Raises:
            ValueError: the state belongs to other data, another seed or mode, or to one rank of
                several when the topology has changed.
        """
        saved = LoaderState.from_plain(state)
        planner, rank = self._recipe.planner, self._world.rank
        saved.check(fingerprint=self._index.fingerprint, mode=planner.mode, seed=planner.seed)
        topology, position, history = saved.topology, saved.position, saved.history
        before, slots = saved.num_samples_before, planner.topology.num_slots
        if not saved.is_complete and (topology, saved.rank) != (planner.topology, rank):
            raise ValueError(
                f"the data position is rank {saved.rank}'s of {topology.world_size} ranks with "
                f"{topology.num_slots} workers; this is rank {rank} of {self._world.world_size} "
                f"with {slots}. Resume from the states of all ranks (TrainLoader.merge_states), "
                "or with the former ranks, workers and batch size"
            )
        if topology != planner.topology:
            history = (*history, Stretch(topology, position.positions))
            before += position.step * topology.world_size * topology.local_batch_size
            position = Position(position.epoch, 0, (0,) * slots)
        elif saved.is_complete:
            own = position.positions[rank * slots : (rank + 1) * slots]
            position = replace(position, positions=own)
        self.close()
        planner = planner.resumed(position.epoch, history, before)
        self._recipe = replace(self._recipe, planner=planner)
        self._position, self._plan = position, planner(position.epoch)
        # Of merged counts, the main rank carries everybody's.
        keeps_counts = self._world.is_main or not saved.is_complete
        self._counts = Counter(saved.counts if keeps_counts else {})

    def close(self) -> None:
        """Stop the workers; iterating again starts new ones at the present position."""
        self._iterator = None

    def _data_loader(self, arrivals: Arrivals) -> DataLoader[Delivery | Failure]:
        workers = self._config.num_workers
        return DataLoader(
            BatchDataset(self._recipe, self._position),
            batch_size=None,
            num_workers=workers,
            collate_fn=_unchanged,
            prefetch_factor=self._config.prefetch_batches if workers else None,
            multiprocessing_context=self._config.start_method if workers else None,
            worker_init_fn=arrivals,
            pin_memory=self._world.device.type == "cuda",
            # Its own generator: drawing the workers' seeds must not move the training's.
            generator=torch.Generator(),
        )


def _next(iterator: Iterator[Delivery | Failure]) -> Delivery:
    try:
        item = next(iterator)
    except RuntimeError as error:  # the DataLoader's word for a worker that died
        line = str(error).splitlines()[0]
        raise DataWorkerError(f"a data worker died: {line} (out of memory?)") from error
    if isinstance(item, Delivery):
        return item
    logger.debug("%s", item.details)
    if item.is_data_error:
        raise ValueError(item.message)
    raise DataWorkerError(f"a data worker failed: {item.message}")


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
    if local_batch_size < 1:
        raise ValueError(f"local_batch_size={local_batch_size}: must be at least 1")
    if config.num_samples is not None and config.num_samples != index.num_samples:
        raise ValueError(
            f"--data.num_samples {config.num_samples}, but the shards hold {index.num_samples}"
        )
    global_batch_size = world.world_size * local_batch_size
    if index.num_samples < global_batch_size:
        raise ValueError(
            f"{index.num_samples} samples in {len(index.shards)} shards cannot fill one global "
            f"batch of {global_batch_size} ({world.world_size} ranks x {local_batch_size}): use a "
            "smaller batch, fewer ranks or more data"
        )
    if config.weights:
        draw_chances(index.sizes, [shard.source for shard in index.shards], config.weights)


def _warn_of_few_shards(index: ShardIndex, topology: Topology) -> None:
    num_consumers = topology.world_size * topology.num_slots
    filled = sum(size > 0 for size in index.sizes)
    if filled < num_consumers:
        logger.warning(
            "%d shards for %d consumers (%d ranks x %d workers): shards are read by several. "
            "More shards, fewer workers or --data.mode resampled avoid that",
            *(filled, num_consumers, topology.world_size, topology.num_slots),
        )


def _smallest_side(config: DataConfig, image_size: int | None) -> int | None:
    """The pixels that a reduced JPEG keeps on its shorter side; None: no reduction."""
    if image_size is None or config.reduced_decode == 0:
        return None
    return round(config.reduced_decode * image_size)
