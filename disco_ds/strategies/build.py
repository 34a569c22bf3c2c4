"""Chooses the strategy of a run from what the user asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from disco_ds.distributed import World
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.ds_config import RunNumbers, read_ds_config, resolve_ds_config
from disco_ds.strategies.single import SingleStrategy
from disco_ds.strategies.zero import ZeroStrategy

StrategyName = Literal["auto", "zero", "single"]


def build_strategy(
    name: StrategyName, deepspeed_config: str | None, run: RunNumbers, world: World
) -> Strategy:
    """The strategy for a run, checked against it; nothing is allocated yet.

    ``auto`` is ``zero`` when there is a DeepSpeed JSON and ``single`` otherwise.

    Raises:
        ValueError: the combination makes no sense, naming the flags.
    """
    if name == "auto":
        name = "zero" if deepspeed_config else "single"
    if name == "zero":
        if not deepspeed_config:
            raise ValueError(
                "--strategy zero needs --deepspeed_config, such as ds_configs/zero2.json"
            )
        given = read_ds_config(Path(deepspeed_config))
        return ZeroStrategy(world, ds_config=resolve_ds_config(deepspeed_config, given, run))
    if deepspeed_config:
        raise ValueError(
            f"--strategy single ignores --deepspeed_config {deepspeed_config}: leave one out"
        )
    if world.world_size > 1:
        raise ValueError(
            f"{world.world_size} ranks need an engine: add --deepspeed_config "
            "ds_configs/zero2.json (or start one process)"
        )
    return SingleStrategy(world, precision=run.precision)
