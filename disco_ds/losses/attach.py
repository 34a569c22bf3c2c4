"""A scalar with known gradients: the one autograd function of the losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Attach(torch.autograd.Function):
    """Backward multiplies by the incoming gradient, nothing else."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [leaf.dtype for leaf in leaves]
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # The product is taken before the cast: fp16 gradients exist only with a loss scale in them.
        gradients = [
            (grad_output * gradient).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (None, None, *gradients)


def attach_gradients(value: Tensor, gradients: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return ``value`` with a graph whose gradient for each ``(leaf, gradient)`` is the given one.

    Leaves that do not require a gradient are left out. Saved for backward: the gradients.
    """
    wanted = [(leaf, gradient) for leaf, gradient in gradients if leaf.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return value
    leaves, saved = zip(*wanted, strict=True)
    result: Tensor = _Attach.apply(value, saved, *leaves)
    return result
