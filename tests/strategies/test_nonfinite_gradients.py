"""A gradient breaks on one rank: every engine finds it by name, and nothing changes by it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engines import NAMES, build
from harness import run_distributed
from tiny import random_pairs, tiny_encoders

from disco_ds.distributed import World, gather_objects
from disco_ds.grad_cache import Pairs, RandomState, contrastive_backward
from disco_ds.losses import DiscoLoss, FastCLIPLoss
from disco_ds.losses.base import ContrastiveLoss
from disco_ds.models import Temperature, TemperatureConfig
from disco_ds.nonfinite import broken_gradients
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import EngineState, Strategy

OPTIM = OptimConfig(lr=1e-3, warmup_steps=0)
SHARES = {2: (6, 6), 3: (5, 3, 4)}
BLOCK = "clip.transformer.resblocks.1"


@dataclass(frozen=True)
class Case:
    """How the step is taken."""

    precision: str = "fp32"
    loss: str = "disco"
    micro_batch_size: int = 6
    checkpointing: bool = False
    factor: float = math.nan
    factor_rank: int = 1


class Poison:
    """Multiplies the gradient of what comes out of a layer in the middle of the text tower.

    It strikes by chance: only a step that is taken again with the same random numbers shows it.
    """

    def __init__(self, strategy: Strategy, factor: float) -> None:
        self.factor, self.is_armed = factor, False
        self._draw: torch.Tensor | None = None
        layer = strategy.module.get_submodule(f"{BLOCK}.mlp.c_fc")
        layer.register_forward_hook(self._after)

    def _after(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        draw = torch.rand(())
        if not self.is_armed or not output.requires_grad:
            return
        self._draw = draw if self._draw is None else self._draw
        if draw == self._draw:
            output.register_hook(lambda gradient: gradient * self.factor)


def make_loss(case: Case, strategy: Strategy) -> ContrastiveLoss:
    group = strategy.process_group
    if case.loss == "disco":
        return DiscoLoss(process_group=group, normalize=True)
    return FastCLIPLoss("v3", num_samples=12, rho=2.0, process_group=group, normalize=True)


def share(number: int, world: World) -> Pairs:
    counts = SHARES[world.world_size]
    pairs = random_pairs(sum(counts), seed=number)
    return pairs.split(counts)[world.rank]


@contextmanager
def gradients_thrown_away() -> Iterator[None]:
    """What autograd collects until the end of a backward pass is one number for each tensor."""
    original, sizes = torch.autograd.grad, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        sizes.extend(g.untyped_storage().nbytes() for g in found if g is not None)
        return found

    with patch.object(torch.autograd, "grad", watched):
        yield
    assert sizes and max(sizes) <= 8, sizes


def train(strategy: Strategy, case: Case, *, broken: int | None) -> tuple[EngineState, list[Any]]:
    """Three steps, the step of number ``broken`` tried with a broken gradient before."""
    world, found = strategy.world, []
    strategy.setup(tiny_encoders(checkpointing=case.checkpointing), OPTIM)
    strategy.module.train()
    poison = Poison(strategy, case.factor if world.rank == case.factor_rank else 1.0)
    loss = make_loss(case, strategy)
    temperature = Temperature(TemperatureConfig(learnable=False))
    for number in range(3):
        pairs = share(number, world)
        for armed in (True, False) if number == broken else (False,):
            torch.manual_seed(10 * number + world.rank)
            random = RandomState.capture(world.device)
            poison.is_armed = armed
            size = case.micro_batch_size
            contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=size)
            after = torch.get_rng_state()
            result = strategy.step(OPTIM.lr)
            assert result.skipped == armed, result
            loss.after_step(result.skipped)
            if armed:
                with gradients_thrown_away():
                    names = broken_gradients(
                        strategy, loss, temperature, pairs, random, micro_batch_size=size
                    )
                loss.after_step(True)
                found = gather_objects(names, world)
                assert torch.equal(torch.get_rng_state(), after)
    state = strategy.state()
    strategy.close()
    return state, found


def check_names(found: list[list[str]], case: Case) -> None:
    """The first is where it began; all that is below is broken, nothing above or beside it."""
    for rank, names in enumerate(found):
        if rank != case.factor_rank:
            assert names == [], (rank, names)
            continue
        assert names[0] in (f"{BLOCK}.mlp.c_fc.weight", f"{BLOCK}.mlp.c_fc.bias"), names
        assert {f"{BLOCK}.attn.in_proj_weight", "clip.token_embedding.weight"} <= set(names), names
        above = (f"{BLOCK}.mlp.c_proj", "clip.ln_final", "clip.text_projection", "clip.visual")
        assert not [name for name in names if name.startswith(above)], names
        assert len(set(names)) == len(names), names


def _check(rank: int, world_size: int, cases: dict[str, Case]) -> None:
    world = World(rank, world_size, rank)
    for name, case in cases.items():

        def strategy(name: str = name, case: Case = case) -> Strategy:
            return build(name, world, pairs=12, precision=case.precision)  # type: ignore[arg-type]

        expected, _ = train(strategy(), case, broken=None)
        state, found = train(strategy(), case, broken=1)
        check_names(found, case)
        for kind in ("parameters", "moments"):
            own, other = getattr(state, kind), getattr(expected, kind)
            assert own.keys() == other.keys(), (name, case)
            different = [key for key, value in own.items() if not torch.equal(value, other[key])]
            assert not different, (name, case, kind, different)
        dist.barrier()


def test_uneven_ranks_micro_batches_and_recomputation() -> None:
    """Three ranks of 5, 3 and 4 pairs, in three micro-batches each, blocks recomputed."""
    case = Case(loss="fastclip", micro_batch_size=2, checkpointing=True, factor=math.inf)
    run_distributed(_check, dict.fromkeys(("ddp", "zero2", "zero3", "fsdp2"), case), world_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batch_size", [2, 6])
def test_every_engine(precision: str, micro_batch_size: int) -> None:
    case = Case(precision, micro_batch_size=micro_batch_size)
    names = [name for name in NAMES if precision == "fp32" or name != "zero0"]
    run_distributed(_check, dict.fromkeys(names, case), world_size=2, timeout=280)
