"""What the ranks would refuse once they run, refused before the job waits in a queue."""

from __future__ import annotations

from disco_ds.config import TrainConfig
from disco_ds.data.remote import is_local
from disco_ds.data.sources import resolve
from disco_ds.distributed import World
from disco_ds.evaluation.run import check_evaluation
from disco_ds.launch.resources import Resources
from disco_ds.presets import DEMO_DATA
from disco_ds.run_plan import choose_parts


def check_settings(config: TrainConfig, resources: Resources) -> None:
    """Check settings against each other and the ranks, and that local data are there.

    Data are looked for on this machine, unless the job runs in a container, which sees other
    folders. What accelerate's launcher decides, and devices, only the ranks can tell.

    Raises:
        ValueError: one line naming the flag, key or file and the remedy.
    """
    world = World(resources.world_size - 1, resources.world_size)  # not the one that reads labels
    if config.strategy != "accelerate":
        choose_parts(config, world)
    if resources.container.runtime != "none" or _makes_its_data(config):
        return
    if local := [shard for shard in config.data.shards if is_local(shard)]:
        resolve(local, missing=config.data.missing_shards)
    check_evaluation(config.evaluation, world)


def _makes_its_data(config: TrainConfig) -> bool:
    """The presets of the demo write their data when they start."""
    return any(shard.startswith(str(DEMO_DATA)) for shard in config.data.shards)
