"""Which implementation of the passes runs: PyTorch anywhere, Triton on a GPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, Protocol

import torch
from torch import Tensor

from disco_ds.losses.pairwise import Block, PairwiseEngine
from disco_ds.losses.sigmoid import SigmoidPairs
from disco_ds.losses.softmax import SoftmaxPairs, TileCache

Kernel = Literal["auto", "torch", "triton"]


class SoftmaxPasses(Protocol):
    """The two passes of InfoNCE over a block; ``softmax.SoftmaxPairs`` documents them."""

    def logsumexps(self, block: Block, key: int) -> tuple[Tensor, Tensor]:
        """Return log-sum-exps over the negatives, by row and by column."""
        ...

    def add_gradients_(
        self,
        block: Block,
        key: int | None,
        *,
        row_lse: Tensor,
        column_lse: Tensor,
        diagonal: Tensor,
        dx: Tensor | None,
        dy: Tensor | None,
    ) -> None:
        """Add the weighted products to the gradients."""
        ...


class SigmoidPasses(Protocol):
    """The pass of SigLIP over a block; ``sigmoid.SigmoidPairs`` documents it."""

    def add_gradients_(
        self, block: Block, *, dx: Tensor | None, dy: Tensor | None, sums: Tensor | None
    ) -> None:
        """Add the weighted products to the gradients, value and weights to the sums."""
        ...


def softmax_passes(
    kernel: Kernel, engine: PairwiseEngine, *, scale: float, kept_bytes: int
) -> SoftmaxPasses:
    """Choose the implementation; ``kept_bytes`` of tiles may be kept between the passes."""
    if use_triton(kernel, engine.device, engine.dtype):
        from disco_ds.losses.pairwise_triton import TritonSoftmaxPairs

        return TritonSoftmaxPairs(scale)
    return SoftmaxPairs(engine, scale, TileCache(kept_bytes))


def sigmoid_passes(
    kernel: Kernel, engine: PairwiseEngine, *, scale: float, bias: float
) -> SigmoidPasses:
    """Choose the implementation."""
    if use_triton(kernel, engine.device, engine.dtype):
        from disco_ds.losses.pairwise_triton import TritonSigmoidPairs

        return TritonSigmoidPairs(scale, bias)
    return SigmoidPairs(engine, scale, bias)


def use_triton(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether Triton runs this call.

    Raises:
        ValueError: when it was asked for and cannot.
    """
    if kernel == "torch":
        return False
    reason = _why_not(device, dtype)
    if kernel == "triton" and reason is not None:
        raise ValueError(f'kernel="triton" {reason}; use kernel="auto" or "torch"')
    return reason is None


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    if dtype == torch.float64:
        return "computes in float32, not in float64"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not is_interpreted:
        return f"needs a GPU, not {device.type}"
    return None
