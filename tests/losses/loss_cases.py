"""Cases of the parity suite: every rank makes the same seeded batch, slices it, and compares.

A check never asserts inside the loop over cases: a rank that stopped early would leave the others
in a collective. It returns messages, and the caller asserts at the end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

from disco_ds.losses import DiscoLoss, SigLIPLoss, reference

BIAS = -2.5
SCALES = (1.0, 14.3, 100.0)
REGIMES = ("random", "converged", "identical", "opposite")
PRECISIONS = ("fp64", "fp32", "bf16_wire")
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("disco", {}),
    ("disco", {"gather": "ring"}),
    ("disco", {"gradient_reduction": "reduce_scatter"}),
    ("disco", {"gradient_reduction": "all_reduce"}),
    ("siglip", {}),
    ("siglip", {"gather": "ring"}),
)


@dataclass(frozen=True)
class Case:
    loss: str
    options: tuple[tuple[str, Any], ...]
    precision: str
    scale: float
    regime: str
    sizes: tuple[int, ...]
    dim: int = 24

    def build(self) -> torch.nn.Module:
        wire = torch.bfloat16 if self.precision == "bf16_wire" else None
        make = DiscoLoss if self.loss == "disco" else SigLIPLoss
        return make(wire_dtype=wire, **dict(self.options))


@dataclass(frozen=True)
class Outcome:
    """Value and gradients of images, texts, scale and bias, in float64."""

    value: Tensor
    gradients: tuple[Tensor, ...]


def all_cases(sizes: tuple[int, ...], precision: str, tile_size: int | None) -> list[Case]:
    """Return loss and variant x scale x regime."""
    return [
        Case(loss, (*options.items(), ("tile_size", tile_size)), precision, scale, regime, sizes)
        for (loss, options), scale, regime in itertools.product(VARIANTS, SCALES, REGIMES)
    ]


@functools.cache
def batch(regime: str, pairs: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return float64 unit features of a global batch."""
    generator = torch.Generator().manual_seed(pairs * 1000 + dim)
    images, texts = torch.randn(2, pairs, dim, dtype=torch.float64, generator=generator)
    if regime == "converged":
        texts = images + 0.05 * texts
    elif regime == "identical":
        images, texts = images[:1].expand(pairs, -1), texts[:1].expand(pairs, -1)
    elif regime == "opposite":
        texts = -images
    return normalize(images, dim=1), normalize(texts, dim=1)


def inputs_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return what the loss is given: float64 or float32."""
    images, texts = batch(case.regime, sum(case.sizes), case.dim)
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    return images.to(dtype), texts.to(dtype)


@functools.cache
def expected(case: Case, dtype: torch.dtype = torch.float64) -> Outcome:
    """Return the reference's outcome on the same (rounded) inputs, computed in ``dtype``."""
    images, texts = inputs_of(case)
    if case.precision == "bf16_wire":
        images, texts = images.bfloat16(), texts.bfloat16()
    scalars = [torch.tensor(number, dtype=dtype) for number in (case.scale, BIAS)]
    leaves = [leaf.to(dtype, copy=True).requires_grad_() for leaf in (images, texts, *scalars)]
    if case.loss == "disco":
        value = reference.info_nce(*leaves[:3]) + 0 * leaves[3]
    else:
        value = reference.siglip(*leaves)
    gradients = torch.autograd.grad(value, leaves)
    return Outcome(value.detach().double(), tuple(g.double() for g in gradients))


def reference_of(case: Case) -> Case:
    """Drop what does not change the right answer, so that the reference runs once."""
    return Case(case.loss, (), case.precision, case.scale, case.regime, case.sizes, case.dim)


def actual(case: Case, rank: int) -> Outcome:
    """Run the loss on this rank's rows; gradients as after a mean over ranks."""
    start = sum(case.sizes[:rank])
    rows = slice(start, start + case.sizes[rank])
    images, texts = (features[rows].clone() for features in inputs_of(case))
    scalars = [torch.tensor(number, dtype=images.dtype) for number in (case.scale, BIAS)]
    leaves = [leaf.requires_grad_() for leaf in (images, texts, *scalars)]
    value = case.build()(*leaves)
    value.backward()
    gradients = [leaf.grad.double() for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == 4
    world_size = len(case.sizes)
    shares = torch.stack(gradients[2:])
    if world_size > 1:
        dist.all_reduce(shares)
    features = (gradient / world_size for gradient in gradients[:2])
    return Outcome(value.detach().double(), (*features, *(shares / world_size)))


def failures(cases: Iterable[Case], rank: int) -> list[str]:
    """Return one message per number that is out of tolerance on this rank."""
    messages: list[str] = []
    for case in cases:
        got, plain = actual(case, rank), reference_of(case)
        want, single = expected(plain), expected(plain, torch.float32)
        start = sum(case.sizes[:rank])
        rows = slice(start, start + case.sizes[rank])
        numbers = [("value", got.value, want.value, single.value, max(1.0, float(want.value)))]
        names = ("images", "texts", "scale", "bias")
        # The size of the terms that a gradient sums up: what rounding errors are relative to.
        terms = (*([case.scale / sum(case.sizes)] * 2), 1.0, 1.0)
        for i, (name, term) in enumerate(zip(names, terms, strict=True)):
            part = rows if i < 2 else ...
            grads = got.gradients[i], want.gradients[i][part], single.gradients[i][part]
            numbers.append((name, *grads, term))
        for name, ours, right, plain_single, term in numbers:
            error = float((ours - right).abs().max())
            allowed = tolerance(case, right, plain_single, term)
            if not error <= allowed:
                messages.append(f"{case}: {name} off by {error:.2e}, allowed {allowed:.2e}")
    return messages


def tolerance(case: Case, right: Tensor, single: Tensor, term: float) -> float:
    """Return the largest error allowed: design.md section 6."""
    size = float(right.abs().max())
    if case.precision == "fp64":
        return 1e-12 * max(term, size)
    # Where terms cancel to nothing the sum cannot be better than their rounding: eps |S| each.
    # Near convergence InfoNCE has small terms, and none but relative errors are good enough.
    is_small = case.loss == "disco" and case.regime == "converged"
    floor = 0.0 if is_small else torch.finfo(torch.float32).eps * (1 + case.scale) * term
    if case.precision == "bf16_wire" or is_small:
        return max(3e-5 * size, floor)
    return 2 * float((single - right).abs().max()) + floor


def assert_none(messages: list[str]) -> None:
    """Fail with the first few messages."""
    shown = "\n".join(messages[:8])
    assert not messages, f"{len(messages)} numbers out of tolerance:\n{shown}"
