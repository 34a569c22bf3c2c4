"""Every strategy by a short name, as the tests and the parity table call it."""

from __future__ import annotations

from typing import Any

from disco_ds.distributed import World
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.config import EngineConfig, Precision
from disco_ds.strategies.ddp import DDPStrategy
from disco_ds.strategies.ds_config import RunNumbers, resolve_ds_config
from disco_ds.strategies.fsdp2 import FSDP2Strategy
from disco_ds.strategies.single import SingleStrategy
from disco_ds.strategies.zero import ZeroStrategy

OFFLOAD = {"device": "cpu", "pin_memory": False}
ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
EXACT = ("ddp", "fsdp2")
NAMES = (*EXACT, *ZERO)


def zero_json(name: str) -> dict[str, Any]:
    """A DeepSpeed JSON for ``zero<stage>[_offload]``: small buckets, everything partitioned."""
    stage = int(name.removeprefix("zero")[0])
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": 2000,
        "allgather_bucket_size": 2000,
    }
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if name.endswith("offload"):
        zero["offload_optimizer"] = OFFLOAD
        if stage == 3:
            zero["offload_param"] = OFFLOAD
    return {"zero_optimization": zero}


def build(
    name: str,
    world: World,
    *,
    pairs: int,
    max_grad_norm: float | None = None,
    precision: Precision = "fp32",
    engine: EngineConfig | None = None,
    json: dict[str, Any] | None = None,
) -> Strategy:
    """The strategy ``name`` for a global batch of ``pairs``."""
    if name == "single":
        return SingleStrategy(world, precision=precision, engine=engine)
    if name == "ddp":
        return DDPStrategy(world, precision=precision, engine=engine)
    if name == "fsdp2":
        return FSDP2Strategy(world, precision=precision, engine=engine)
    numbers = RunNumbers(pairs, world.world_size, pairs, precision, max_grad_norm)
    given = {**zero_json(name), **(json or {})}
    resolved = resolve_ds_config("test.json", given, numbers)
    return ZeroStrategy(world, ds_config=resolved, engine=engine)
