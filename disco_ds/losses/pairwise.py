"""The tile engine: walk over ``rows x columns`` in tiles and never hold more than two of them.

Every loss is a choice of weights ``M_ij`` in the same two products, ``dX += M Y`` and
``dY += M^T X``, where ``M`` depends on one tile of logits and on scalars per row and per column.
This module owns what they share: which tile, which buffer, where the diagonal runs, which pairs are
excluded. ``softmax.py`` and ``sigmoid.py`` are the choices.

Shapes: ``n`` rows of this rank, ``m`` columns of one rank, ``d`` embedding size, ``t`` tile size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Two fp32 buffers of 4 MiB stay in a CPU's cache, and products are at full speed at this size.
# Elsewhere kernels need more work per launch: two buffers of 16 MiB.
CPU_TILE_SIZE = 1024
GPU_TILE_SIZE = 2048


def default_tile_size(device: torch.device) -> int:
    """Return the tile size for ``tile_size=None``: 8 MiB of buffers on CPU, 32 MiB elsewhere."""
    return CPU_TILE_SIZE if device.type == "cpu" else GPU_TILE_SIZE


@dataclass(frozen=True)
class Block:
    """Rows of this rank against the columns of one rank.

    ``x`` [n, d] and ``y`` [m, d] may be of any float dtype. ``is_own``: columns belong to the same
    samples as the rows, so the diagonal holds the positives. ``row_index`` [n] and
    ``column_index`` [m], when given, exclude pairs of equal index.
    """

    x: Tensor
    y: Tensor
    is_own: bool
    row_index: Tensor | None = None
    column_index: Tensor | None = None


@dataclass(frozen=True)
class Tile:
    """One tile of a block: its place, its features in the compute dtype, its excluded pairs."""

    rows: slice
    columns: slice
    x: Tensor  # [t, d]
    y: Tensor  # [t, d]
    is_own: bool
    excluded: Tensor | None  # bool [t, t]: pairs of equal index, the diagonal among them

    def diagonal(self, matrix: Tensor) -> Tensor | None:
        """Return the view of ``matrix`` ([t, t]) that holds positives, if any passes through."""
        if not self.is_own or self.positive_rows().start >= self.positive_rows().stop:
            return None
        return matrix.diagonal(self.rows.start - self.columns.start)

    def positive_rows(self) -> slice:
        """Return the rows, counted in the block, whose positive lies in this tile."""
        start = max(self.rows.start, self.columns.start)
        return slice(start, min(self.rows.stop, self.columns.stop))

    def exclude_(self, matrix: Tensor, value: float) -> Tensor:
        """Write ``value`` where a pair is no negative: the positives and pairs of equal index."""
        diagonal = self.diagonal(matrix)
        if diagonal is not None:
            diagonal.fill_(value)
        if self.excluded is not None:
            matrix.masked_fill_(self.excluded, value)
        return matrix

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the tile."""
        return len(self.x), len(self.y)


class PairwiseEngine:
    """Cuts blocks into tiles and computes their logits and weighted products.

    ``dtype`` is that of products and accumulators (float32, or float64). Working memory: two
    ``tile_size ** 2`` buffers, and two of ``[tile_size, d]`` where features have another dtype.
    """

    def __init__(self, tile_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tile_size = tile_size
        self.dtype = dtype
        self.device = device
        self._buffers = [torch.empty(0, dtype=dtype, device=device) for _ in range(4)]

    def tiles(self, block: Block) -> Iterator[Tile]:
        """Yield the tiles of a block, row by row, so that a row's accumulator stays in cache."""
        for rows in _slices(len(block.x), self.tile_size):
            x = self._cast(2, block.x[rows])
            for columns in _slices(len(block.y), self.tile_size):
                excluded = None
                if block.row_index is not None and block.column_index is not None:
                    excluded = block.row_index[rows, None] == block.column_index[None, columns]
                y = self._cast(3, block.y[columns])
                yield Tile(rows, columns, x, y, block.is_own, excluded)

    def buffer(self, which: int, shape: torch.Size | tuple[int, int]) -> Tensor:
        """Return scratch buffer 0 or 1 in this shape; its content is whatever was there."""
        size = math.prod(shape)
        if self._buffers[which].numel() < size:
            self._buffers[which] = self._buffers[which].new_empty(size)
        return self._buffers[which][:size].view(shape)

    def _cast(self, which: int, features: Tensor) -> Tensor:
        if features.dtype == self.dtype:
            return features
        return self.buffer(which, features.shape).copy_(features)

    def logits(self, tile: Tile, scale: float) -> Tensor:
        """Return ``scale * <x_i, y_j>`` in buffer 0; the scale multiplies the accumulator."""
        out = self.buffer(0, tile.shape)
        return torch.addmm(out, tile.x, tile.y.T, beta=0, alpha=scale, out=out)


def add_products_(weights: Tensor, tile: Tile, dx: Tensor | None, dy: Tensor | None) -> None:
    """Add ``M Y`` to ``dx`` ([n, d]) and ``M^T X`` to ``dy`` ([m, d]), where they are wanted."""
    if dx is not None:
        dx[tile.rows].addmm_(weights, tile.y)
    if dy is not None:
        dy[tile.columns].addmm_(weights.T, tile.x)


def row_dots(x: Tensor, y: Tensor, chunk: int = 1024) -> Tensor:
    """Return ``<x_i, y_i>`` in float64 ([n]), a chunk at a time."""
    parts = zip(torch.split(x, chunk), torch.split(y, chunk), strict=True)
    return torch.cat([(a.double() * b.double()).sum(1) for a, b in parts])


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
