"""InfoNCE on tiles: log-sum-exps over negatives, then the weights of the gradient.

With ``S`` the logits, ``r_i`` and ``c_j`` the row and column log-sum-exps over all pairs,

    M_ij = exp(S_ij - r_i) + exp(S_ij - c_j)      (j != i)
    M_ii = expm1(-delta_r_i) + expm1(-delta_c_i)

``delta`` is the per-sample loss, ``softplus(lse over negatives - S_ii)``, so ``r_i = S_ii +
delta_r_i``; written this way nothing cancels near convergence. FastCLIP has the same form with
other ``r``, ``c`` and diagonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from disco_ds.losses.inputs import has_values
from disco_ds.losses.pairwise import Block, PairwiseEngine, Tile, add_products_

# exp() of this distance is still a normal number, with room for a product with its inverse.
SAFE_RANGE = {torch.float32: 80.0, torch.float64: 600.0}


@dataclass(frozen=True)
class NegativeTile:
    """The negatives of a tile, ready for sums of exponentials.

    Where the logits of a tile lie within the range of the dtype's exponent, which is nearly
    always, ``values`` is ``exp(S - shift)`` and serves rows and columns with one exponential per
    logit. Otherwise ``shift`` is None and ``values`` is ``S``. Excluded pairs are 0, or ``-inf``.
    """

    values: Tensor  # [t, t]
    shift: float | None

    @classmethod
    def from_logits(cls, logits: Tensor, tile: Tile) -> NegativeTile:
        """Take over the buffer ``logits``."""
        # A positive may be far from all negatives; it must not decide about the range.
        diagonal = tile.diagonal(logits)
        if diagonal is not None:
            diagonal.zero_()
        low, high = _bounds(logits)
        if high - low <= SAFE_RANGE[logits.dtype]:
            return cls(tile.exclude_(logits.sub_(high).exp_(), 0.0), high)
        return cls(tile.exclude_(logits, -math.inf), None)

    def logsumexp(self, dim: int) -> Tensor:
        """Sum over rows (``dim=0``) or columns (``dim=1``); float64, ``-inf`` without negatives."""
        if self.shift is None:
            return self.values.logsumexp(dim).double()
        return self.values.sum(dim).double().log_().add_(self.shift)

    def weights_(self, row_lse: Tensor, column_lse: Tensor, scratch: Tensor) -> Tensor:
        """Turn ``values`` into ``exp(S_ij - r_i) + exp(S_ij - c_j)``, 0 for excluded pairs."""
        if self.shift is None:
            torch.sub(self.values, row_lse[:, None], out=scratch).exp_()
            return self.values.sub_(column_lse).exp_().add_(scratch)
        # Where a row has a negative here its lse is within the range (plus a little for an estimate
        # of it); elsewhere 0 * inf would be NaN.
        limit = SAFE_RANGE[self.values.dtype] + 5
        rows = (self.shift - row_lse).clamp_(max=limit).exp_()
        columns = (self.shift - column_lse).clamp_(max=limit).exp_()
        torch.add(rows[:, None], columns, out=scratch)
        return self.values.mul_(scratch)


def _bounds(logits: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(logits)
    return (float(low), float(high)) if has_values(low) else (0.0, 0.0)


@dataclass
class TileCache:
    """Tiles kept from the first pass for the second, as many as fit into ``budget_bytes``."""

    budget_bytes: int
    _kept: dict[tuple[int | None, int, int], NegativeTile] = field(default_factory=dict)

    def keep(self, block: int, tile: Tile, negatives: NegativeTile) -> None:
        """Copy a tile if there is room; ``block`` is the rank that owns the columns."""
        size = negatives.values.numel() * negatives.values.element_size()
        if size <= self.budget_bytes:
            self.budget_bytes -= size
            key = (block, tile.rows.start, tile.columns.start)
            self._kept[key] = NegativeTile(negatives.values.clone(), negatives.shift)

    def take(self, block: int | None, tile: Tile) -> NegativeTile | None:
        """Hand a tile over, once."""
        return self._kept.pop((block, tile.rows.start, tile.columns.start), None)


@dataclass(frozen=True)
class SoftmaxPairs:
    """The two passes over a block; ``scale`` multiplies the dot products."""

    engine: PairwiseEngine
    scale: float
    cache: TileCache

    def logsumexps(self, block: Block, key: int) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exps over the block's negatives, by row [n] and column [m], float64.

        One ``n x m x d`` product and one exponential per logit. ``key`` names the block for the
        tile cache.
        """
        row_lse = block.x.new_full((len(block.x),), -math.inf, dtype=torch.float64)
        column_lse = block.x.new_full((len(block.y),), -math.inf, dtype=torch.float64)
        for tile in self.engine.tiles(block):
            negatives = self._negatives(tile)
            for total, part in (
                (row_lse[tile.rows], negatives.logsumexp(1)),
                (column_lse[tile.columns], negatives.logsumexp(0)),
            ):
                torch.logaddexp(total, part, out=total)
            self.cache.keep(key, tile, negatives)
        return row_lse, column_lse

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
        """Add ``M Y`` to ``dx`` ([n, d]) and ``M^T X`` to ``dy`` ([m, d]).

        ``row_lse`` [n], ``column_lse`` [m] are ``r`` and ``c``; ``diagonal`` [n] is ``M_ii``, used
        where the block is our own. One product for the logits, unless the cache has them, and one
        per gradient.
        """
        for tile in self.engine.tiles(block):
            negatives = self.cache.take(key, tile) or self._negatives(tile)
            scratch = self.engine.buffer(1, tile.shape)
            weights = negatives.weights_(row_lse[tile.rows], column_lse[tile.columns], scratch)
            positives = tile.diagonal(weights)
            if positives is not None:
                positives.copy_(diagonal[tile.positive_rows()])
            add_products_(weights, tile, dx, dy)

    def _negatives(self, tile: Tile) -> NegativeTile:
        return NegativeTile.from_logits(self.engine.logits(tile, self.scale), tile)
