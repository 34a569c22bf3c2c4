"""Trace and closed forms against counted bytes of real steps on two real CPU ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed

from disco_ds.models import ModelConfig
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.step import Measured
from disco_ds.strategies.config import EngineConfig

TOLERANCE = 0.05


def request_of(strategy: str, **changes: Any) -> PlanRequest:
    """32 pairs a rank."""
    request = PlanRequest(
        ModelConfig("disco-demo-vit"),
        global_batch_size=64,
        world_size=2,
        precision="fp32",
        strategy=strategy,
    )
    return request.with_(**changes)


RECOMPUTING = ModelConfig("disco-demo-vit", activation_checkpointing=True)
SYNCED = ModelConfig("disco-demo-rn", batch_norm="synced")


def cases(strategy: str) -> list[PlanRequest]:
    """One micro-batch, and several with recomputation."""
    return [
        request_of(strategy),
        request_of(strategy, model=RECOMPUTING, micro_batch_size=8),
    ]


def fsdp2_cases() -> list[PlanRequest]:
    """So few pairs that what is gathered and reduced makes the peak, and every option."""
    few = request_of("fsdp2", global_batch_size=16)
    every = EngineConfig(reduce_every_micro_batch=True)
    stays = EngineConfig(reshard_after_forward=False)
    return [
        few,
        few.with_(precision="bf16"),
        few.with_(precision="bf16", micro_batch_size=4, engine=every),
        few.with_(micro_batch_size=4, engine=every),
        few.with_(micro_batch_size=4, engine=stays),
    ]


def zero3_cases() -> list[PlanRequest]:
    """Rules of fetching that matter in a small model, and a bucket that it fills."""

    def rules(**changes: int) -> dict[str, Any]:
        zero = {
            "stage": 3,
            "stage3_param_persistence_threshold": 1000,
            "stage3_prefetch_bucket_size": 100_000,
            "reduce_bucket_size": 5_000_000,
        }
        return {"zero_optimization": zero | changes, "communication_data_type": "fp32"}

    return [
        request_of("zero3", model=RECOMPUTING, ds_config=rules(stage3_max_reuse_distance=200_000)),
        request_of(
            "zero3",
            micro_batch_size=16,
            ds_config=rules(stage3_max_live_parameters=200_000, stage3_max_reuse_distance=400_000),
        ),
    ]


def batch_norm_cases() -> list[PlanRequest]:
    """Statistics of synchronised BatchNorm travel beside everything else."""
    return [
        request_of(name, model=SYNCED, micro_batch_size=micro)
        for name, micro in (("ddp", None), ("fsdp2", 16))
    ]


def worker(rank: int, world_size: int, cases: Sequence[PlanRequest], output: str) -> None:
    from disco_ds.distributed import World
    from disco_ds.planner.measure import measure

    found = [measure(case, World(rank, world_size, rank)) for case in cases]
    if rank == 0:
        torch.save(found, output)


def measured(cases: Sequence[PlanRequest], folder: Path) -> list[Measured]:
    """The last of a few real steps of rank 0."""
    run_distributed(worker, cases, str(folder / "real"), world_size=2, timeout=200)
    found: list[Measured] = torch.load(folder / "real", weights_only=False)
    return found


QUICK = ("ddp", "fsdp2", "zero2", "zero3")
SLOW = {
    "zero0": cases("zero0"),
    "zero1": cases("zero1"),
    "fsdp2-options": fsdp2_cases(),
    "zero3-rules": zero3_cases(),
    "batch-norm": batch_norm_cases(),
}


@pytest.mark.parametrize(
    "cases",
    [
        *(pytest.param(cases(name), id=name) for name in QUICK),
        *(pytest.param(found, id=name, marks=pytest.mark.slow) for name, found in SLOW.items()),
    ],
)
def test_trace_and_closed_forms_equal_real_ranks(cases: list[PlanRequest], tmp_path: Path) -> None:
    from disco_ds.planner.comm import step_traffic
    from disco_ds.planner.memory import step_memory
    from disco_ds.planner.plan import profile_of
    from disco_ds.planner.trace import trace

    for case, real in zip(cases, measured(cases, tmp_path), strict=True):
        traced = trace(case, like_cuda=False).step
        assert abs(traced.peak.bytes / real.peak.bytes - 1) <= TOLERANCE, (case, traced, real)
        at_rest = sum(traced.at_rest.values()) / sum(real.at_rest.values())
        assert abs(at_rest - 1) <= 0.001
        assert traced.traffic == real.traffic, (case, traced.traffic, real.traffic)
        assert traced.counted == real.counted
        known = profile_of(case, like_cuda=False)
        memory = step_memory(case, known, like_cuda=False)
        assert abs(memory.peak / real.peak.bytes - 1) <= TOLERANCE, (case, memory.phases, real)
        assert step_traffic(case, known) == real.traffic, case
