"""LAMB, Lion and SGD under every engine that takes them; LAMB refused where tensors are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import build
from harness import run_distributed
from parity import PAIRS
from tiny import random_pairs, rows_of, tiny_encoders
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.grad_cache import contrastive_backward
from disco_ds.losses import DiscoLoss
from disco_ds.models import Temperature, TemperatureConfig
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import Strategy

STEPS = 3
ENGINES = {
    "lamb": ("ddp", "fsdp2", "zero0"),
    "lion": ("ddp", "fsdp2", "zero0", "zero2", "zero3"),
    "sgdm": ("ddp", "fsdp2", "zero0", "zero2", "zero3"),
}


def config(name: str) -> OptimConfig:
    return OptimConfig(name=name, lr=1e-3, warmup_steps=0, eps=1e-4)  # type: ignore[arg-type]


def train(strategy: Strategy, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    strategy.setup(tiny_encoders().to(dtype), config(name))
    temperature = Temperature(TemperatureConfig(learnable=False)).to(dtype)
    loss = DiscoLoss(process_group=strategy.process_group, normalize=True)
    world = strategy.world
    for step in range(STEPS):
        pairs = rows_of(random_pairs(PAIRS, seed=step, dtype=dtype), world.rank, world.world_size)
        contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=PAIRS)
        strategy.step(1e-3)
    return strategy.state().parameters


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def _check(rank: int, world_size: int, expected: dict[Any, dict[str, Tensor]]) -> None:
    world = World(rank, world_size, rank)
    problems = []
    for name, engines in ENGINES.items():
        for engine in engines:
            dtype = torch.float64 if engine in ("ddp", "fsdp2") else torch.float32
            # Lion takes the sign: rounding of a gradient that is zero moves a weight by 2 lr.
            limit = 1e-12 if dtype == torch.float64 else 1e-5
            strategy = build(engine, world, pairs=PAIRS)
            found = train(strategy, name, dtype)
            strategy.close()
            if not world.is_main:
                continue
            want = expected[name, dtype]
            if name == "lion":
                found, want = (
                    {k: v for k, v in d.items() if "in_proj" not in k} for d in (found, want)
                )
            error = differences(found, want)
            if not error <= limit:
                problems.append(f"{name} under {engine}: {error:.1e}")
    assert not problems, problems


def test_every_optimizer_equals_one_process() -> None:
    expected = {
        (name, dtype): train(build("single", World(), pairs=PAIRS), name, dtype)
        for name in ENGINES
        for dtype in (torch.float32, torch.float64)
    }
    run_distributed(_check, expected, world_size=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lamb_is_refused_where_tensors_are_split(stage: int) -> None:
    strategy = build(f"zero{stage}", World(), pairs=PAIRS)
    with pytest.raises(ValueError, match=r"--optim.name lamb: ZeRO stage .*zero0.json, .*fsdp2"):
        strategy.check_optimizer(config("lamb"))
    strategy.check_optimizer(config("lion"))
    build("zero0", World(), pairs=PAIRS).check_optimizer(config("lamb"))
