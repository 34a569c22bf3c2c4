"""FastCLIP's two passes over blocks, for one temperature or one per sample.

With ``p1_ij`` the weight of text j among image i's negatives and ``p2_ji`` that of image i among
text j's, the gradients are ``M Y`` and ``M^T X`` with (fastclip.py, matrix form)

    M_ij = a1_i p1_ij + a2_j p2_ji   (i != j),     M_ii = -(a1_i sum_j p1_ij + a2_i sum_j p2_ij)
    p1_ij = exp(s_ij/tau1_i - R_i),   p2_ji = exp(s_ij/tau2_j - C_j)

One temperature makes this InfoNCE with other log-sum-exps ``R``, ``C`` and another diagonal. With
individual ones, rows are divided by their temperature before the product, and each kind of anchor
has a pass of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.losses.base import Call
from disco_ds.losses.exchange import Blocks
from disco_ds.losses.info_nce import InfoNCE, Softmax
from disco_ds.losses.pairwise import Block, row_dots
from disco_ds.losses.softmax import SoftmaxPairs, TileCache


@dataclass(frozen=True)
class Anchors:
    """Scalars of all samples of a global batch, each ``[B]`` in rank order.

    ``rows`` and ``columns`` are ``R`` and ``C``; ``sums`` ``[2, B]`` are ``sum_j p_ij``;
    ``coefficients`` ``[2, B]`` are ``a``.
    """

    rows: Tensor
    columns: Tensor
    sums: Tensor
    coefficients: Tensor


@dataclass(frozen=True)
class Products:
    """``dx = M Y``, ``dy = M^T X`` of own rows ``[b, d]``, where wanted.

    ``moved`` ``[2, b]``: ``sum_j p_ij h_ij`` of own anchors (individual temperatures only).
    """

    dx: Tensor | None
    dy: Tensor | None
    moved: Tensor | None = None


class GlobalTemperature:
    """All anchors share ``1/logit_scale``: three to five ``b x B x d`` products."""

    def __init__(self, call: Call, info_nce: InfoNCE) -> None:
        self._call, self._info_nce = call, info_nce
        self._texts = call.stream(call.y)
        self._images = call.stream(call.x) if call.want_text_side else None

    def negatives(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps of ``s/tau`` over own anchors' negatives, float64 ``[b]`` each."""
        return self._info_nce.negatives(self._texts)

    def gradients(self, anchors: Anchors) -> Products:
        """Both halves at once: M with ``a = 1`` (a common factor is the caller's)."""
        sizes, dtype = self._call.agreed.sizes, self._call.agreed.compute_dtype
        own = own_rows(self._call)
        softmax = Softmax(
            rows=list(anchors.rows.to(dtype).split(list(sizes))),
            columns=list(anchors.columns.to(dtype).split(list(sizes))),
            diagonal=-anchors.sums[:, own].sum(0).to(dtype),
            loss_sum=anchors.sums.sum(),
        )
        return Products(*self._info_nce.gradients(softmax, self._texts, self._images))


class IndividualTemperatures:
    """Every anchor has its own temperature: ten ``b x B x d`` products.

    Args:
        taus: ``[2, B]`` of all samples, image anchors first.
        indices: ids per rank that exclude pairs of equal id, or None.
    """

    def __init__(self, call: Call, taus: Tensor, indices: list[Tensor] | None) -> None:
        self._call, self._indices = call, indices
        # Rows are scaled before the product, so the product itself has scale 1.
        self._pairs = SoftmaxPairs(call.engine, 1.0, TileCache(0))
        self._taus = [
            list(side.to(call.agreed.compute_dtype).split(list(call.agreed.sizes))) for side in taus
        ]
        self._texts = call.stream(call.y)
        self._images = call.stream(call.x)

    def negatives(self) -> tuple[Tensor, Tensor]:
        """Log-sum-exps of ``s/tau`` over own anchors' negatives, float64 ``[b]`` each."""
        call = self._call
        return self._lse(call.x, self._texts, 0), self._lse(call.y, self._images, 1)

    def maxima(self) -> tuple[Tensor, Tensor]:
        """Largest ``s_ij/tau_i`` of own anchors, the positive included, ``[b]`` each."""
        call = self._call
        return self._max(call.x, self._texts, 0), self._max(call.y, self._images, 1)

    def gradients(self, anchors: Anchors) -> Products:
        """The halves where own rows are anchors, kept apart for ``moved``, then the others."""
        call, own = self._call, own_rows(self._call)
        sums, a = anchors.sums[:, own], anchors.coefficients[:, own]
        by_image = self._as_anchor(call.x, self._texts, 0, anchors.rows)
        by_text = self._as_anchor(call.y, self._images, 1, anchors.columns)
        positives = row_dots(call.x, call.y)
        moved = torch.stack([row_dots(call.x, by_image), row_dots(call.y, by_text)])
        moved -= positives * sums
        diagonal = (a * sums).sum(0).to(by_image)[:, None]
        dx = by_image * a[0].to(by_image)[:, None] - diagonal * call.y
        dy = by_text * a[1].to(by_text)[:, None] - diagonal * call.x
        self._as_negative(call.x, self._texts, 1, anchors.columns, anchors.coefficients[1], dx)
        self._as_negative(call.y, self._images, 0, anchors.rows, anchors.coefficients[0], dy)
        return Products(dx, dy, moved)

    def _lse(self, own: Tensor, others: Blocks, side: int) -> Tensor:
        anchors = self._divided(own, side, self._call.exchange.rank)
        total = anchors.new_full((len(own),), -math.inf, dtype=torch.float64)
        for rank, other in others:
            part, _ = self._pairs.logsumexps(self._block(anchors, other, rank), rank)
            total = torch.logaddexp(total, part)
        return total

    def _max(self, own: Tensor, others: Blocks, side: int) -> Tensor:
        anchors = self._divided(own, side, self._call.exchange.rank)
        highest = anchors.new_full((len(own),), -math.inf)
        for _, other in others:
            for tile in self._call.engine.tiles(Block(anchors, other, is_own=False)):
                part = self._call.engine.logits(tile, 1.0).amax(1)
                torch.maximum(highest[tile.rows], part, out=highest[tile.rows])
        return highest

    def _as_anchor(self, own: Tensor, others: Blocks, side: int, lse: Tensor) -> Tensor:
        """``sum_j exp(s_ij/tau_i - lse_i) other_j`` of own anchors i, ``[b, d]``."""
        call = self._call
        anchors = self._divided(own, side, call.exchange.rank)
        total = torch.zeros_like(anchors)
        row_lse = lse[own_rows(call)].to(total)
        for rank, other in others:
            self._add(self._block(anchors, other, rank), row_lse, None, total)
        return total

    def _as_negative(
        self, own: Tensor, others: Blocks, side: int, lse: Tensor, a: Tensor, out: Tensor
    ) -> None:
        """Add ``sum_j a_j exp(s_ij/tau_j - lse_j) other_j`` to ``out``: own rows are negatives.

        The divided features are those of the product too, so the weights carry ``tau_j``.
        """
        sizes = list(self._call.agreed.sizes)
        splits = zip(lse.split(sizes), a.split(sizes), strict=True)
        columns = [part - torch.log(weight) for part, weight in splits]
        for rank, other in others:
            tau = self._taus[side][rank]
            block = self._block(own, self._divided(other, side, rank), rank)
            self._add(block, None, columns[rank].to(out) - tau.log(), out)

    def _add(
        self, block: Block, row_lse: Tensor | None, column_lse: Tensor | None, out: Tensor
    ) -> None:
        """One kind of anchor: an infinite log-sum-exp switches the other kind off."""
        self._pairs.add_gradients_(
            block,
            None,
            row_lse=out.new_full((len(block.x),), math.inf) if row_lse is None else row_lse,
            column_lse=out.new_full((len(block.y),), math.inf)
            if column_lse is None
            else column_lse,
            diagonal=out.new_zeros(len(block.x)),
            dx=out,
            dy=None,
        )

    def _divided(self, features: Tensor, side: int, rank: int) -> Tensor:
        tau = self._taus[side][rank]
        divided: Tensor = features.to(tau.dtype) / tau[:, None]
        return divided

    def _block(self, own: Tensor, other: Tensor, rank: int) -> Block:
        mine = self._call.exchange.rank
        if self._indices is None:
            return Block(own, other, rank == mine)
        return Block(own, other, rank == mine, self._indices[mine], self._indices[rank])


def own_rows(call: Call) -> slice:
    """Where this rank's samples stand in the global batch."""
    start = sum(call.agreed.sizes[: call.exchange.rank])
    return slice(start, start + call.agreed.sizes[call.exchange.rank])
