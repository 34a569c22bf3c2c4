"""The parity matrix: cases, the training run of a case, and how far two runs are apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from engines import EXACT, NAMES, build
from tiny import random_pairs, rows_of, tiny_encoders
from torch import Tensor

from disco_ds.distributed import World, mean_over_ranks_
from disco_ds.grad_cache import contrastive_backward
from disco_ds.losses import DiscoLoss, SigLIPLoss
from disco_ds.models import Temperature, TemperatureConfig
from disco_ds.optim import OptimConfig, build_optimizer
from disco_ds.strategies.base import EngineState, Strategy

PAIRS = 12
STEPS = 3
LR = 1e-3
CLIP_NORM = 0.05
LOSSES = {"disco": DiscoLoss, "siglip": SigLIPLoss}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    strategy: str
    loss: str = "disco"
    micro_batches: int = 1
    checkpointing: bool = False
    clipping: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """ZeRO has no float64; the others are compared in it."""
        return torch.float64 if self.strategy in EXACT else torch.float32

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.dtype == torch.float64 else 1e-5

    def __str__(self) -> str:
        flags = ("checkpointing" * self.checkpointing, "clipping" * self.clipping)
        micro = f"{self.micro_batches} micro-batches"
        return ", ".join(filter(None, (self.strategy, self.loss, micro, *flags)))


@dataclass(frozen=True)
class Run:
    """What a run left: everything that has to agree."""

    state: EngineState
    scalars: dict[str, Tensor]
    losses: list[float]
    norms: list[float]


def strategies_for(world_size: int) -> list[str]:
    """accelerate wraps nothing on one process."""
    alone = ("accelerate_ddp", "accelerate_fsdp2")
    return [name for name in NAMES if world_size > 1 or name not in alone]


def full_matrix(world_size: int) -> list[Case]:
    """loss x strategy x micro-batches x checkpointing x clipping."""
    flags = (False, True)
    names = strategies_for(world_size)
    return [Case(*parts) for parts in itertools.product(names, LOSSES, (1, 2, 3), flags, flags)]


def covering(world_size: int) -> list[Case]:
    """Few cases per strategy: each setting and most pairs occur, over all world sizes."""
    rows = {
        1: [("siglip", 2, False, True)],
        2: [("disco", 1, False, False), ("siglip", 3, True, True)],
        3: [("disco", 2, True, True)],
    }
    # Three ranks and one are for what depends on their number: uneven shards, no shards.
    names = strategies_for(2) if world_size == 2 else ["ddp", "fsdp2", "zero0", "zero2", "zero3"]
    return [Case(name, *row) for name in names for row in rows[world_size]]


def train(strategy: Strategy, case: Case, *, dtype: torch.dtype) -> Run:
    """A few AdamW steps on this rank's share of the pairs."""
    # A large epsilon keeps Adam from turning the rounding of zero gradients (key biases have
    # none) into steps of full size.
    optim = OptimConfig(
        lr=LR, warmup_steps=0, eps=1e-4, max_grad_norm=CLIP_NORM if case.clipping else None
    )
    encoders = tiny_encoders(checkpointing=case.checkpointing).to(dtype)
    strategy.setup(encoders, optim)
    world = strategy.world
    bias = -2.0 if case.loss == "siglip" else None
    temperature = Temperature(TemperatureConfig(), bias=bias).to(dtype)
    temperature_optimizer = build_optimizer(optim, temperature.parameters())
    loss = LOSSES[case.loss](process_group=strategy.process_group, normalize=True)
    losses, norms = [], []
    for step in range(STEPS):
        pairs = rows_of(random_pairs(PAIRS, seed=step, dtype=dtype), world.rank, world.world_size)
        temperature.zero_grad()
        size = -(-len(pairs.index) // case.micro_batches)
        value = contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=size)
        mean_over_ranks_([p.grad for p in temperature.parameters() if p.grad is not None], world)
        norms.append(strategy.step(LR).grad_norm)
        temperature_optimizer.step()
        losses.append(float(value))
    scalars = {name: p.detach() for name, p in temperature.named_parameters()}
    return Run(strategy.state(), scalars, losses, norms)


References = dict[tuple[str, bool, torch.dtype], Run]


def references() -> References:
    """One process with the whole batch at once. Not for workers: there is a group there."""
    found = {}
    for loss, clipping in itertools.product(LOSSES, (False, True)):
        for dtype in (torch.float32, torch.float64):
            strategy = build("single", World(), pairs=PAIRS)
            run = train(strategy, Case("single", loss, clipping=clipping), dtype=dtype)
            found[loss, clipping, dtype] = run
    return found


def distance(found: Run, expected: Run) -> float:
    """Largest difference of losses, norms, temperature, weights and moments.

    Relative to the largest number of a tensor where that is above 1.
    """
    assert found.state.optimizer_steps == expected.state.optimizer_steps
    return max(_differences(_numbers(found), _numbers(expected)).values())


def _numbers(run: Run) -> dict[str, Tensor]:
    return {
        **{f"loss {step}": torch.tensor(value) for step, value in enumerate(run.losses)},
        **{f"norm {step}": torch.tensor(value) for step, value in enumerate(run.norms)},
        **run.scalars,
        **run.state.parameters,
        **run.state.moments,
    }


def _differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - value).abs().max() / value.abs().max().clamp(min=1))
        for name, value in expected.items()
    }


def errors_of(cases: Iterable[Case], expected: References, world: World) -> dict[Case, float]:
    """Run all cases; their distances to one process, on the main rank. Collective."""
    errors = {}
    for case in cases:
        limit = CLIP_NORM if case.clipping else None
        strategy = build(case.strategy, world, pairs=PAIRS, max_grad_norm=limit)
        run = train(strategy, case, dtype=case.dtype)
        strategy.close()
        if world.is_main:
            errors[case] = distance(run, expected[case.loss, case.clipping, case.dtype])
        dist.barrier()
    return errors
