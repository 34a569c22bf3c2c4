"""FastCLIP under every engine: weights, temperature and per-sample tables equal one process's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from engines import build
from harness import run_distributed
from parity import LR, PAIRS
from tiny import random_pairs, rows_of, tiny_encoders
from torch import Tensor

from disco_ds.distributed import World, mean_over_ranks_
from disco_ds.grad_cache import Pairs, contrastive_backward
from disco_ds.losses import FastCLIPLoss
from disco_ds.models import Temperature, TemperatureConfig
from disco_ds.optim import OptimConfig, build_optimizer
from disco_ds.strategies.base import EngineState, Strategy

NUM_SAMPLES = 20
STEPS = 4


@dataclass(frozen=True)
class Run:
    state: EngineState
    logit_scale: Tensor
    tables: dict[str, Tensor]


def batch(step: int, dtype: torch.dtype) -> Pairs:
    pairs = random_pairs(PAIRS, seed=step, dtype=dtype)
    generator = torch.Generator().manual_seed(step)
    return Pairs(pairs.image, pairs.text, torch.randperm(NUM_SAMPLES, generator=generator)[:PAIRS])


def train(strategy: Strategy, version: str, micro_batches: int, dtype: torch.dtype) -> Run:
    optim = OptimConfig(lr=LR, warmup_steps=0, eps=1e-4)
    strategy.setup(tiny_encoders().to(dtype), optim)
    world = strategy.world
    temperature = Temperature(TemperatureConfig()).to(dtype)
    optimizer = build_optimizer(optim, temperature.parameters())
    loss = FastCLIPLoss(
        version,
        num_samples=NUM_SAMPLES,
        gamma_min=0.4,
        gamma_decay_epochs=2.0,
        rho=2.0,
        tau_lr=0.01,
        process_group=strategy.process_group,
        normalize=True,
        table_dtype=torch.float64,
    )
    for step in range(STEPS):
        pairs = rows_of(batch(step, dtype), world.rank, world.world_size)
        temperature.zero_grad()
        loss.set_progress(step * 0.5)
        size = -(-len(pairs.index) // micro_batches)
        contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=size)
        mean_over_ranks_([p.grad for p in temperature.parameters() if p.grad is not None], world)
        strategy.step(LR)
        optimizer.step()
        loss.after_step(skipped=False)
    tables = loss.table.read(torch.arange(NUM_SAMPLES))
    return Run(strategy.state(), temperature.logit_scale.detach(), tables)


def furthest(found: Run, expected: Run, *, is_main: bool) -> float:
    pairs = [(found.logit_scale, expected.logit_scale)]
    pairs += [(found.tables[name], value) for name, value in expected.tables.items()]
    if is_main:
        pairs += [(found.state.parameters[n], v) for n, v in expected.state.parameters.items()]
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)


def _check(rank: int, world_size: int, expected: dict) -> None:
    world = World(rank, world_size, rank)
    problems = []
    for name in ("ddp", "fsdp2", "zero1", "zero2", "zero3"):
        dtype = torch.float64 if name in ("ddp", "fsdp2") else torch.float32
        limit = 1e-12 if dtype == torch.float64 else 1e-5
        for version, micro_batches in (("v3", 1), ("v2", 3)):
            strategy = build(name, world, pairs=PAIRS)
            found = train(strategy, version, micro_batches, dtype)
            error = furthest(found, expected[version, dtype], is_main=world.is_main)
            strategy.close()
            if not error <= limit:
                problems.append(f"{name} {version} x{micro_batches}: {error:.1e}")
    assert not problems, problems


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_strategy_equals_one_process(world_size: int) -> None:
    expected = {
        (version, dtype): train(build("single", World(), pairs=PAIRS), version, 1, dtype)
        for version in ("v2", "v3")
        for dtype in (torch.float32, torch.float64)
    }
    run_distributed(_check, expected, world_size=world_size, timeout=200)
