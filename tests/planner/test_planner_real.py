"""The trace against counted bytes of real steps on two real CPU ranks, DeepSpeed's included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness import run_distributed

from disco_ds.models import ModelConfig
from disco_ds.planner.request import PlanRequest

ENGINES = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
TOLERANCE = 0.05


def requests(strategy: str) -> list[PlanRequest]:
    """One micro-batch, and several with recomputation."""
    model = "disco-demo-vit"
    return [
        PlanRequest(
            ModelConfig(model, activation_checkpointing=micro is not None),
            global_batch_size=64,
            world_size=2,
            micro_batch_size=micro,
            precision="fp32",
            strategy=strategy,
        )
        for micro in (None, 8)
    ]


def worker(rank: int, world_size: int, cases: Sequence[PlanRequest], output: str) -> None:
    from disco_ds.distributed import World
    from disco_ds.planner.measure import measure

    found = [measure(case, World(rank, world_size, rank)) for case in cases]
    if rank == 0:
        torch.save([(m.peak.bytes, m.at_rest, m.traffic, m.counted) for m in found], output)


QUICK = ("ddp", "fsdp2", "zero2", "zero3")


@pytest.mark.parametrize(
    "strategy",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES],
)
def test_trace_equals_real_ranks(strategy: str, tmp_path: Path) -> None:
    from disco_ds.planner.trace import trace

    cases = requests(strategy)
    run_distributed(worker, cases, str(tmp_path / "real"), world_size=2, timeout=200)
    real = torch.load(tmp_path / "real", weights_only=False)
    for case, (peak, at_rest, traffic, counted) in zip(cases, real, strict=True):
        traced = trace(case, like_cuda=False).step
        assert abs(traced.peak.bytes / peak - 1) <= TOLERANCE, (case, traced.peak, peak)
        assert abs(sum(traced.at_rest.values()) / sum(at_rest.values()) - 1) <= 0.001
        assert traced.traffic == traffic, (case, traced.traffic, traffic)
        assert traced.counted == counted
