"""Chooses the strategy of a run from what the user asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disco_ds.comm_hooks import CommHookConfig
from disco_ds.distributed import World
from disco_ds.strategies import hf_accelerate
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.config import ONLY_FOR, EngineConfig, StrategyName
from disco_ds.strategies.ddp import DDPStrategy
from disco_ds.strategies.ds_config import (
    RunNumbers,
    read_comm_hook,
    read_ds_config,
    resolve_ds_config,
)
from disco_ds.strategies.fsdp2 import FSDP2Strategy
from disco_ds.strategies.single import SingleStrategy
from disco_ds.strategies.zero import ZeroStrategy


def build_strategy(
    name: StrategyName,
    deepspeed_config: str | None,
    run: RunNumbers,
    world: World,
    *,
    engine: EngineConfig | None = None,
) -> Strategy:
    """The strategy for a run, checked against it; nothing is allocated yet.

    Raises:
        ValueError: the combination makes no sense, naming the flags.
    """
    engine = engine or EngineConfig()
    name = _resolve(name, deepspeed_config, world)
    _check_engine(name, engine)
    if name == "accelerate":
        return _build_accelerate(deepspeed_config, run, world, engine)
    if name == "zero":
        assert deepspeed_config is not None
        config = _resolved(deepspeed_config, run, engine)
        return ZeroStrategy(world, ds_config=config, engine=engine)
    kinds: dict[str, Callable[..., Strategy]] = {
        "ddp": DDPStrategy,
        "fsdp2": FSDP2Strategy,
        "single": SingleStrategy,
    }
    return kinds[name](world, precision=run.precision, engine=engine)


def _build_accelerate(
    deepspeed_config: str | None, run: RunNumbers, world: World, engine: EngineConfig
) -> Strategy:
    """accelerate's choice between DDP, FSDP2 and DeepSpeed, as its launcher left it."""
    hf_accelerate.import_accelerate()
    hf_accelerate.check_precision(os.environ, run.precision)
    kind = hf_accelerate.kind_from_environment(os.environ, deepspeed_config)
    if kind == "zero":
        source = hf_accelerate.deepspeed_file(os.environ, deepspeed_config)
        config = _resolved(source, run, engine)
        return hf_accelerate.AccelerateZeroStrategy(world, ds_config=config, engine=engine)
    if kind == "ddp":
        _check_engine("ddp", engine)
        return hf_accelerate.AccelerateDDPStrategy(world, precision=run.precision, engine=engine)
    return hf_accelerate.AccelerateFSDP2Strategy(world, precision=run.precision, engine=engine)


def _resolved(source: str, run: RunNumbers, engine: EngineConfig) -> dict[str, Any]:
    """The DeepSpeed configuration, checked against run and options."""
    config = resolve_ds_config(source, read_ds_config(Path(source)), run)
    stage = config["zero_optimization"].get("stage", 0)
    if engine.compile and stage == 3:
        raise ValueError(
            f"--engine.compile True with stage 3 ({source}): its parameters come and go inside the "
            "compiled blocks; use stage 2, or --strategy fsdp2"
        )
    if engine.reduce_every_micro_batch and stage < 2:
        raise ValueError(
            f"--engine.reduce_every_micro_batch True with stage {stage} ({source}): every rank "
            "holds whole gradients there; leave it out"
        )
    return config


def _resolve(name: StrategyName, deepspeed_config: str | None, world: World) -> StrategyName:
    """``auto``: zero with a DeepSpeed JSON, else ddp for several ranks, else single."""
    if name == "auto":
        if deepspeed_config:
            return "zero"
        return "ddp" if world.world_size > 1 else "single"
    if name == "zero" and not deepspeed_config:
        raise ValueError("--strategy zero needs --deepspeed_config, such as ds_configs/zero2.json")
    if name not in ("zero", "accelerate") and deepspeed_config:
        raise ValueError(
            f"--strategy {name} ignores --deepspeed_config {deepspeed_config}: leave one out"
        )
    if name == "single" and world.world_size > 1:
        raise ValueError(
            f"--strategy single on {world.world_size} ranks: leave it out (ddp), choose fsdp2, "
            "or add --deepspeed_config ds_configs/zero2.json"
        )
    return name


def _check_engine(name: StrategyName, engine: EngineConfig) -> None:
    """Refuse options that the strategy would ignore."""
    defaults = EngineConfig()
    for option, strategies in ONLY_FOR.items():
        value = getattr(engine, option)
        if name not in strategies and value != getattr(defaults, option):
            raise ValueError(
                f"--engine.{option} {value}: strategy {name} has no such option, "
                f"{' and '.join(strategies)} have"
            )


def choose_comm_hook(deepspeed_config: str | None, flags: CommHookConfig) -> CommHookConfig:
    """The hook of a run: of the DeepSpeed JSON's ``"disco"`` section, or of the flags.

    Raises:
        ValueError: both are given and differ, or the section is wrong.
    """
    if deepspeed_config is None:
        return flags
    of_file = read_comm_hook(deepspeed_config, read_ds_config(Path(deepspeed_config)))
    if of_file is None or of_file == flags:
        return flags
    if flags != CommHookConfig():
        raise ValueError(
            f'{deepspeed_config}: "disco" has {of_file}, --comm_hook is {flags}; give one of them'
        )
    return of_file
