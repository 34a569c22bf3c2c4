"""The plan of any epoch of a run, from the settings, the index and what was consumed before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
from disco_ds.distributed import World


@dataclass(frozen=True)
class Planner:
    """Makes the plan of an epoch; plain values, so that workers can be given one."""

    mode: Literal["exact", "resampled"]
    sizes: tuple[int, ...]
    sources: tuple[int, ...]
    """Per shard, the number of the source that named it."""
    weights: tuple[float, ...]
    """Per source; none: each source by its size."""
    seed: int
    topology: Topology
    history_epoch: int = 0
    history: tuple[Stretch, ...] = ()
    """What other topologies consumed of ``history_epoch``."""
    num_samples_before: int = 0
    """How many samples that were."""

    @classmethod
    def create(
        cls, config: DataConfig, index: ShardIndex, *, topology: Topology, seed: int
    ) -> Planner:
        """The planner of a run that starts from the beginning."""
        sources = tuple(shard.source for shard in index.shards)
        return cls(config.mode, index.sizes, sources, config.weights, seed, topology)

    def __call__(self, epoch: int) -> EpochPlan:
        """The plan of an epoch."""
        resumed = epoch == self.history_epoch
        history = self.history if resumed else ()
        if self.mode == "exact":
            return ExactPlan(
                self.sizes, seed=self.seed, epoch=epoch, topology=self.topology, history=history
            )
        weights = self.weights or _natural_weights(self.sizes, self.sources)
        return ResampledPlan(
            self.sizes,
            seed=self.seed,
            epoch=epoch,
            topology=self.topology,
            chances=draw_chances(self.sizes, self.sources, weights),
            history=history,
            num_samples_before=self.num_samples_before if resumed else 0,
        )

    def resumed(self, epoch: int, history: tuple[Stretch, ...], num_samples_before: int) -> Planner:
        """The same, with an epoch that other topologies have begun."""
        return replace(
            self,
            history_epoch=epoch,
            history=history,
            num_samples_before=num_samples_before,
        )


def make_topology(config: DataConfig, world: World, local_batch_size: int) -> Topology:
    """The topology that settings amount to."""
    return Topology(
        world_size=world.world_size,
        num_slots=max(1, config.num_workers),
        local_batch_size=local_batch_size,
        window=max(1, config.shuffle_buffer),
    )


def _natural_weights(sizes: Sequence[int], sources: Sequence[int]) -> list[float]:
    """Each source by its size."""
    weights = [0.0] * (max(sources) + 1)
    for size, source in zip(sizes, sources, strict=True):
        weights[source] += size
    return weights
