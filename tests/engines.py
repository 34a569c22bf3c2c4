"""Every strategy by a short name, as the tests and the parity table call it."""

from __future__ import annotations

import os
from typing import Any

from disco_ds.distributed import World
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.config import EngineConfig, Precision
from disco_ds.strategies.ddp import DDPStrategy
from disco_ds.strategies.ds_config import RunNumbers, resolve_ds_config
from disco_ds.strategies.fsdp2 import FSDP2Strategy
from disco_ds.strategies.hf_accelerate import (
    AccelerateDDPStrategy,
    AccelerateFSDP2Strategy,
    AccelerateZeroStrategy,
)
from disco_ds.strategies.single import SingleStrategy
from disco_ds.strategies.zero import ZeroStrategy

OFFLOAD = {"device": "cpu", "pin_memory": False}
ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
EXACT = ("ddp", "fsdp2", "accelerate_ddp", "accelerate_fsdp2")
NAMES = (*EXACT, *ZERO, "accelerate_zero2")


class _FSDP2OnCPU(AccelerateFSDP2Strategy):
    """accelerate drops its FSDP plugin without a GPU; put it back to test on CPU."""

    def _accelerator(self, plugin: Any) -> Any:
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType

        accelerator = super()._accelerator(plugin)
        accelerator.state.fsdp_plugin = plugin
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        return accelerator


def _forget_accelerate() -> None:
    """accelerate keeps one state per process and in the environment; tests make several."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


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
    if name.startswith("accelerate"):
        _forget_accelerate()
    if name == "accelerate_ddp":
        return AccelerateDDPStrategy(world, precision=precision, engine=engine)
    if name == "accelerate_fsdp2":
        return _FSDP2OnCPU(world, precision=precision, engine=engine)
    kind = AccelerateZeroStrategy if name.startswith("accelerate") else ZeroStrategy
    name = name.removeprefix("accelerate_")
    numbers = RunNumbers(pairs, world.world_size, pairs, precision, max_grad_norm)
    given = {**zero_json(name), **(json or {})}
    resolved = resolve_ds_config("test.json", given, numbers)
    return kind(world, ds_config=resolved, engine=engine)
