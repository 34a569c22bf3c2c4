"""Which gradients exist when, what is kept for them, and the methods every loss has."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from loss_cases import BIAS, batch
from torch import Tensor

from disco_ds.losses import (
    ContrastiveLoss,
    DiscoConfig,
    DiscoLoss,
    SigLIPConfig,
    SigLIPLoss,
    reference,
)
from disco_ds.losses.exchange import Exchange

LOSSES = [DiscoLoss(), SigLIPLoss()]


def leaves(pairs: int = 6, dim: int = 8) -> list[Tensor]:
    features = [f.clone().requires_grad_() for f in batch("random", pairs, dim)]
    scalars = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (14.3, BIAS)]
    return [*features, *scalars]


def exact(loss: ContrastiveLoss, inputs: list[Tensor]) -> Tensor:
    if isinstance(loss, SigLIPLoss):
        return reference.siglip(*inputs)
    return reference.info_nce(*inputs[:3]) + 0 * inputs[3]


@pytest.mark.parametrize("loss", LOSSES, ids=["disco", "siglip"])
@pytest.mark.parametrize("wanted", range(1, 16), ids=lambda bits: f"{bits:04b}")
def test_any_subset_of_inputs_may_require_gradients(loss: ContrastiveLoss, wanted: int) -> None:
    """Locked towers, constant temperature, and what is left."""
    inputs = leaves()
    for bit, leaf in enumerate(inputs):
        leaf.requires_grad_(bool(wanted >> bit & 1))
    chosen = [leaf for leaf in inputs if leaf.requires_grad]
    got = torch.autograd.grad(loss(*inputs), chosen)
    want = torch.autograd.grad(exact(loss, inputs), chosen)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def locked_tower_worker(rank: int, world_size: int) -> None:
    """One tower on one rank alone wants a gradient: the collectives must still match."""
    pairs = 4
    for options in ({}, {"gather": "ring"}, {"gradient_reduction": "reduce_scatter"}):
        for tower in (0, 1):
            full = [f.clone().requires_grad_() for f in batch("random", 2 * pairs, 8)]
            want = torch.autograd.grad(reference.info_nce(*full, 14.3), full)[tower]
            rows = slice(rank * pairs, (rank + 1) * pairs)
            own = [f.detach()[rows].clone() for f in full]
            own[tower].requires_grad_(rank == 0)
            value = DiscoLoss(**options)(*own, 14.3)
            if rank == 0:
                value.backward()
                torch.testing.assert_close(own[tower].grad / world_size, want[rows])


def test_gradient_wanted_on_one_rank_only() -> None:
    run_distributed(locked_tower_worker, world_size=2)


@pytest.mark.parametrize("loss", LOSSES, ids=["disco", "siglip"])
def test_no_grad_gives_the_value_without_a_graph(loss: ContrastiveLoss) -> None:
    inputs = leaves()
    with torch.no_grad():
        value = loss(*inputs)
    assert not value.requires_grad
    torch.testing.assert_close(value, exact(loss, inputs).detach())


@pytest.mark.parametrize("loss", LOSSES, ids=["disco", "siglip"])
def test_backward_twice_adds_up(loss: ContrastiveLoss) -> None:
    inputs = leaves()
    value = loss(*inputs)
    (3 * value).backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in inputs]
    (3 * value).backward()
    for leaf, gradient in zip(inputs, once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * gradient)


@pytest.mark.parametrize("loss", LOSSES, ids=["disco", "siglip"])
def test_autocast_does_not_reach_the_logits(loss: ContrastiveLoss) -> None:
    inputs = [leaf.detach().float() for leaf in leaves()]
    with torch.autocast("cpu", torch.bfloat16):
        inside = loss(*inputs)
    assert torch.equal(inside, loss(*inputs))


@pytest.mark.parametrize("loss", LOSSES, ids=["disco", "siglip"])
def test_common_methods(loss: ContrastiveLoss) -> None:
    value = loss(*leaves(), output_dict=True)
    assert set(value) == {"contrastive_loss"}
    loss.set_progress(0.5)
    loss.after_step(skipped=True)
    assert loss.state_dict() == {}


def test_chance_level_is_the_value_of_features_that_say_nothing() -> None:
    same = torch.ones(6, 4, dtype=torch.float64) / 2
    for loss, bias in ((DiscoLoss(), None), (SigLIPLoss(), -10.0 - math.log(5))):
        value = loss(same, same, 10.0, bias)
        assert loss.metrics()["chance_level"] == pytest.approx(float(value))
    assert DiscoLoss()._chance_level(6) == math.log(6)


def overlap_worker(rank: int, world_size: int) -> None:
    """The own block comes before anything waits for the network."""
    own = torch.full((3, 2), float(rank))
    wait = dist.Work.wait
    waited: list[int] = []

    def counted(self: dist.Work) -> bool:
        waited.append(1)
        return wait(self)

    for gather in ("all", "ring"):
        waited.clear()
        with patch.object(dist.Work, "wait", counted):
            blocks = iter(Exchange().stream(own, [3, 3], gather))
            first, block = next(blocks)
            assert (first, waited) == (rank, [])
            assert block is own
            other, block = next(blocks)
            assert waited
        assert other == 1 - rank
        assert (block == other).all()
        assert next(blocks, None) is None


def test_own_block_is_worked_on_while_the_others_travel() -> None:
    run_distributed(overlap_worker, world_size=2)


@pytest.mark.parametrize("config", [DiscoConfig(), SigLIPConfig()])
def test_config_builds_what_it_says(config: Any) -> None:
    loss = config.build(None, normalize=True)
    assert loss.normalize
    for field in fields(config):
        if field.name != "name":
            assert getattr(loss, field.name) == getattr(config, field.name)
    assert type(config)(wire_dtype="bf16").build().wire_dtype == torch.bfloat16


def subgroup_worker(rank: int, world_size: int) -> None:
    """Two groups of two ranks are two global batches."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    place, pairs = dist.get_rank(group), 3
    full = [f.clone().requires_grad_() for f in batch("random", 2 * pairs, 8 + rank % 2)]
    want = torch.autograd.grad(reference.info_nce(*full, 14.3), full)
    rows = slice(place * pairs, (place + 1) * pairs)
    for options in ({}, {"gather": "ring"}, {"gradient_reduction": "reduce_scatter"}):
        own = [f.detach()[rows].clone().requires_grad_() for f in full]
        DiscoLoss(process_group=group, **options)(*own, 14.3).backward()
        for leaf, gradient in zip(own, want, strict=True):
            torch.testing.assert_close(leaf.grad / 2, gradient[rows], rtol=0, atol=1e-12)


def test_sub_groups() -> None:
    run_distributed(subgroup_worker, world_size=4)
