"""The passes of ``softmax.py`` and ``sigmoid.py`` as Triton kernels, with the same semantics.

Every tensor is masked in rows, columns and d, so no size needs to be a power of two or a multiple
of a block. A program owns the rows it writes: no atomics, the result does not depend on the order
of programs. Logits, exponentials and accumulators are fp32 whatever the features are; products of
fp32 operands use three TF32 products, which keeps fp32 accuracy on tensor cores.

Import this module only where Triton is installed; ``kernels.py`` decides. With
``TRITON_INTERPRET=1`` set before the import the kernels run on the CPU, slowly, for tests.
"""

# Kernels are Triton's language, not Python's: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from disco_ds.losses.pairwise import Block

# Rows of a program of the log-sum-exp kernel. Not tuned: its column sums have one row per program.
LSE_ROWS = 64
# Row tiles per launch, and so the height of the buffer of column sums: [64, m].
LSE_ROW_TILES = 64
# Programs a launch should have at least, by splitting the columns of a row tile.
LSE_PROGRAMS = 256

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
PRECISION = "ieee" if torch.version.hip else "tf32x3"


def _tuned(kernel: Any, configs: list[dict[str, int]], key: list[str], restore: list[str]) -> Any:
    """Autotune over block sizes; the interpreter takes the last, largest configuration."""
    if IS_INTERPRETED:
        return _Fixed(kernel, configs[-1])
    choices = [
        triton.Config(config, num_warps=warps, num_stages=stages)
        for config in configs
        for warps, stages in ((4, 2), (8, 3))
    ]
    return triton.autotune(choices, key=key, restore_value=restore)(kernel)


class _Fixed:
    """A kernel with its block sizes filled in."""

    def __init__(self, kernel: Any, config: dict[str, int]) -> None:
        self._kernel, self._config = kernel, config

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self._kernel[grid](*args, **kwargs, **self._config)


@triton.jit
def _dots(
    x, y, rows, columns, n, m, dim, x_stride, y_stride,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return ``<x_i, y_j>`` ([BLOCK_M, BLOCK_N], fp32)."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, dim, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x_mask = (rows[:, None] < n) & (d[None, :] < dim)
        y_mask = (columns[None, :] < m) & (d[:, None] < dim)
        x_part = tl.load(x + rows[:, None] * x_stride + d[None, :], x_mask, other=0.0)
        y_part = tl.load(y + columns[None, :] * y_stride + d[:, None], y_mask, other=0.0)
        total = tl.dot(x_part.to(DTYPE), y_part.to(DTYPE), total, input_precision=PRECISION)
    return total


@triton.jit
def _negatives(
    rows, columns, n, m, row_index, column_index, IS_OWN: tl.constexpr, HAS_INDEX: tl.constexpr
):
    """Return which pairs of the tile are negatives."""
    negative = (rows[:, None] < n) & (columns[None, :] < m)
    if IS_OWN:
        negative = negative & (rows[:, None] != columns[None, :])
    if HAS_INDEX:
        row_ids = tl.load(row_index + rows, rows < n, other=0)
        column_ids = tl.load(column_index + columns, columns < m, other=0)
        negative = negative & (row_ids[:, None] != column_ids[None, :])
    return negative


@triton.jit
def _lse_kernel(
    x, y, row_parts, column_parts, row_index, column_index,
    n, m, dim, x_stride, y_stride, columns_per_split, scale,
    IS_OWN: tl.constexpr, HAS_INDEX: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    first_row, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Log-sum-exps of one row tile over one split of the columns, by row and by column.

    ``row_parts`` [splits, n], ``column_parts`` [row tiles of this launch, m].
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = (first_row + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    high = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    begin = split * columns_per_split
    for start in range(begin, tl.minimum(begin + columns_per_split, m), BLOCK_N):
        columns = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dots = _dots(
            x, y, rows, columns, n, m, dim, x_stride, y_stride,
            DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        negative = _negatives(rows, columns, n, m, row_index, column_index, IS_OWN, HAS_INDEX)
        logits = tl.where(negative, dots * scale, float("-inf"))
        # Online maximum; a row without a negative so far has -inf, from which nothing may be taken.
        new_high = tl.maximum(high, tl.max(logits, 1))
        shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        total = total * tl.exp(high - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
        high = new_high
        column_high = tl.max(logits, 0)
        shift = tl.where(column_high == float("-inf"), 0.0, column_high)
        column_total = tl.sum(tl.exp(logits - shift[None, :]), 0)
        column_lse = shift + tl.log(column_total)
        tl.store(column_parts + tile * m + columns, column_lse, columns < m)
    shift = tl.where(high == float("-inf"), 0.0, high)
    tl.store(row_parts + split.to(tl.int64) * n + rows, shift + tl.log(total), rows < n)


@triton.jit
def _softmax_weights(
    dots, rows, columns, n, m, row_lse, column_lse, diagonal, row_index, column_index, scale,
    IS_OWN: tl.constexpr, HAS_INDEX: tl.constexpr,
):  # fmt: skip
    """Return ``M``: two softmaxes off the diagonal, the given values on it."""
    r = tl.load(row_lse + rows, rows < n, other=0.0)
    c = tl.load(column_lse + columns, columns < m, other=0.0)
    negative = _negatives(rows, columns, n, m, row_index, column_index, IS_OWN, HAS_INDEX)
    logits = dots * scale
    weights = tl.exp(logits - r[:, None]) + tl.exp(logits - c[None, :])
    weights = tl.where(negative, weights, 0.0)
    if IS_OWN:
        positive = tl.load(diagonal + rows, rows < n, other=0.0)
        on_diagonal = (rows[:, None] == columns[None, :]) & (rows[:, None] < n)
        weights = tl.where(on_diagonal, positive[:, None], weights)
    return weights


@triton.jit
def _sigmoid_terms(dots, rows, columns, n, m, scale, bias, IS_OWN: tl.constexpr):
    """Return ``M`` and the terms of the value; a positive has the sign of its logit changed."""
    inside = (rows[:, None] < n) & (columns[None, :] < m)
    z = dots * scale + bias
    sign = tl.full(z.shape, 1.0, tl.float32)
    if IS_OWN:
        sign = tl.where(rows[:, None] == columns[None, :], -1.0, 1.0)
    z = z * sign
    small = tl.exp(-tl.abs(z))
    weights = tl.where(z >= 0, 1.0, small) / (1.0 + small) * sign
    # log1p(small), which is small itself once 1 + small rounds to 1.
    rounded = 1.0 + small
    log1p = tl.where(rounded == 1.0, small, tl.log(rounded) * (small / (rounded - 1.0)))
    terms = tl.maximum(z, 0.0) + log1p
    return tl.where(inside, weights, 0.0), tl.where(inside, terms, 0.0)


@triton.jit
def _gradient_kernel(
    x, y, gradient, row_lse, column_lse, diagonal, row_index, column_index, sums,
    n, m, dim, x_stride, y_stride, gradient_stride, scale, bias,
    IS_SOFTMAX: tl.constexpr, IS_OWN: tl.constexpr, HAS_INDEX: tl.constexpr,
    HAS_GRADIENT: tl.constexpr, HAS_SUMS: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add ``M Y`` to the rows of one program, and (value, sum of M) per row to ``sums`` [2, n].

    The accumulator [BLOCK_M, d] does not fit into registers at the d of CLIP models; it stays in
    the L2 cache, where only this program touches it.
    """
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    value = tl.zeros((BLOCK_M,), tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, m, BLOCK_N):
        columns = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        dots = _dots(
            x, y, rows, columns, n, m, dim, x_stride, y_stride,
            DTYPE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if IS_SOFTMAX:
            weights = _softmax_weights(
                dots, rows, columns, n, m, row_lse, column_lse, diagonal, row_index, column_index,
                scale, IS_OWN, HAS_INDEX,
            )  # fmt: skip
        else:
            weights, terms = _sigmoid_terms(dots, rows, columns, n, m, scale, bias, IS_OWN)
            value += tl.sum(terms, 1)
            weight_sum += tl.sum(weights, 1)
        if HAS_GRADIENT:
            for d_start in range(0, dim, BLOCK_D):
                d = d_start + tl.arange(0, BLOCK_D)
                y_mask = (columns[:, None] < m) & (d[None, :] < dim)
                mask = (rows[:, None] < n) & (d[None, :] < dim)
                y_part = tl.load(y + columns[:, None] * y_stride + d[None, :], y_mask, other=0.0)
                place = gradient + rows[:, None] * gradient_stride + d[None, :]
                total = tl.load(place, mask, other=0.0)
                total = tl.dot(weights, y_part.to(tl.float32), total, input_precision=PRECISION)
                tl.store(place, total, mask)
            tl.debug_barrier()
    if HAS_SUMS:
        tl.store(sums + rows, value, rows < n)
        tl.store(sums + n + rows, weight_sum, rows < n)


_lse = _tuned(
    _lse_kernel,
    [
        {"BLOCK_N": 64, "BLOCK_D": 32},
        {"BLOCK_N": 128, "BLOCK_D": 32},
        {"BLOCK_N": 128, "BLOCK_D": 64},
    ],
    key=["dim", "DTYPE"],
    restore=[],
)
_gradient = _tuned(
    _gradient_kernel,
    [
        {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 32},
        {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_D": 32},
        {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 64},
    ],
    key=["dim", "DTYPE", "IS_SOFTMAX"],
    restore=["gradient"],
)


def _operands(block: Block) -> dict[str, Any]:
    """Return the kernel arguments that describe a block."""
    x, y = block.x, block.y
    same = x.dtype == y.dtype and x.dtype in (torch.bfloat16, torch.float16)
    same = same and not IS_INTERPRETED  # its dot product takes the bits of bf16 for integers
    low = tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16
    has_index = block.row_index is not None
    # Pointers that the kernel never follows still have to be tensors.
    row_index, column_index = (block.row_index, block.column_index) if has_index else (x, x)
    return {
        "x": x, "y": y, "row_index": row_index, "column_index": column_index,
        "n": len(x), "m": len(y), "dim": x.shape[1],
        "x_stride": x.stride(0), "y_stride": y.stride(0),
        "IS_OWN": block.is_own, "HAS_INDEX": has_index,
        "DTYPE": low if same else tl.float32, "PRECISION": PRECISION,
    }  # fmt: skip


def _transposed(block: Block) -> Block:
    return Block(block.y, block.x, block.is_own, block.column_index, block.row_index)


def _add_gradient(block: Block, gradient: Tensor | None, sums: Tensor | None, **args: Any) -> None:
    """Launch the gradient kernel; arguments that its kind does not use are stand-ins."""
    unused = block.x
    full = {"row_lse": unused, "column_lse": unused, "diagonal": unused, "bias": 0.0, **args}

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(len(block.x), meta["BLOCK_M"]),)

    with torch.cuda.device_of(block.x):  # Triton launches on the current device
        _gradient[grid](
            gradient=unused if gradient is None else gradient,
            gradient_stride=0 if gradient is None else gradient.stride(0),
            sums=unused if sums is None else sums,
            HAS_GRADIENT=gradient is not None,
            HAS_SUMS=sums is not None,
            **_operands(block),
            **full,
        )


@dataclass(frozen=True)
class TritonSoftmaxPairs:
    """As :class:`disco_ds.losses.softmax.SoftmaxPairs`; keeps no tiles."""

    scale: float

    def logsumexps(self, block: Block, key: int) -> tuple[Tensor, Tensor]:
        """Return log-sum-exps over the block's negatives, by row [n] and by column [m], float64."""
        n, m = len(block.x), len(block.y)
        tiles = min(triton.cdiv(n, LSE_ROWS), LSE_ROW_TILES)
        splits = min(triton.cdiv(LSE_PROGRAMS, tiles), triton.cdiv(m, 128))
        per_split = triton.cdiv(triton.cdiv(m, splits), 128) * 128
        row_parts = block.x.new_full((splits, n), float("-inf"), dtype=torch.float32)
        column_lse = block.x.new_full((m,), float("-inf"), dtype=torch.float64)
        for first_row in range(0, n, tiles * LSE_ROWS):
            launched = min(tiles, triton.cdiv(n - first_row, LSE_ROWS))
            column_parts = block.x.new_empty(launched, m, dtype=torch.float32)
            with torch.cuda.device_of(block.x):
                _lse[(launched, splits)](
                    row_parts=row_parts,
                    column_parts=column_parts,
                    columns_per_split=per_split,
                    scale=self.scale,
                    BLOCK_M=LSE_ROWS,
                    first_row=first_row,
                    **_operands(block),
                )
            part = column_parts.double().logsumexp(0)
            torch.logaddexp(column_lse, part, out=column_lse)
        return row_parts.double().logsumexp(0), column_lse

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
        """Add ``M Y`` to ``dx`` and ``M^T X`` to ``dy``; one launch each."""
        common = {"scale": self.scale, "IS_SOFTMAX": True, "diagonal": diagonal}
        if dx is not None:
            _add_gradient(block, dx, None, row_lse=row_lse, column_lse=column_lse, **common)
        if dy is not None:
            turned = _transposed(block)
            _add_gradient(turned, dy, None, row_lse=column_lse, column_lse=row_lse, **common)


@dataclass(frozen=True)
class TritonSigmoidPairs:
    """As :class:`disco_ds.losses.sigmoid.SigmoidPairs`."""

    scale: float
    bias: float

    def add_gradients_(
        self, block: Block, *, dx: Tensor | None, dy: Tensor | None, sums: Tensor | None
    ) -> None:
        """Add ``M Y`` to ``dx``, ``M^T X`` to ``dy`` and (value, sum of M) to ``sums``."""
        common = {"scale": self.scale, "bias": self.bias, "IS_SOFTMAX": False}
        if dx is not None or sums is not None:
            parts = None
            if sums is not None:
                parts = block.x.new_empty(2, len(block.x), dtype=torch.float32)
            _add_gradient(block, dx, parts, **common)
            if sums is not None and parts is not None:
                sums += parts.double().sum(1)
        if dy is not None:
            _add_gradient(_transposed(block), dy, None, **common)
