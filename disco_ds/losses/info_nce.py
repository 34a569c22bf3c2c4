"""InfoNCE from one rank's rows: the passes over blocks, for any way of gathering and reducing.

First pass: own images against all texts. That completes the row log-sum-exps ``r``; each rank's
share of the column log-sum-exps ``c`` goes back to the owners of the columns, and ``r`` and ``c``
are gathered. With these scalars every ``M_ij`` can be computed anywhere (``softmax.py``):

    dX_k = (scale/2B) sum_m M_km Y_m        dY_k = (scale/2B) sum_m (M_mk)^T X_m
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.losses.base import Call
from disco_ds.losses.exchange import Blocks
from disco_ds.losses.kernels import SoftmaxPasses
from disco_ds.losses.pairwise import Block, row_dots


@dataclass(frozen=True)
class Softmax:
    """The scalars that define all softmaxes of a global batch.

    ``rows[k]`` and ``columns[k]`` ([n_k], compute dtype) are ``r`` and ``c`` of rank k's samples;
    ``diagonal`` ([b]) is ``M_ii`` of this rank's; ``loss_sum`` (0-D) is the sum of both
    directions' losses over the samples of all ranks.
    """

    rows: list[Tensor]
    columns: list[Tensor]
    diagonal: Tensor
    loss_sum: Tensor


@dataclass(frozen=True)
class InfoNCE:
    """The passes of one call. ``indices[k]`` ([n_k]), when given, exclude pairs of equal index."""

    call: Call
    pairs: SoftmaxPasses
    indices: list[Tensor] | None

    def first_pass(self, texts: Blocks) -> Softmax:
        """Compute the softmaxes: one ``b x B x d`` product, two collectives of scalars."""
        call, dtype = self.call, self.call.agreed.compute_dtype
        row_lse, column_lse = self.negatives(texts)
        positives = call.agreed.scale * row_dots(call.x, call.y)
        row_loss, column_loss = (
            torch.logaddexp(lse - positives, torch.zeros_like(positives))
            for lse in (row_lse, column_lse)
        )
        rows, columns, loss_sum = self._share(
            positives + row_loss, positives + column_loss, (row_loss + column_loss).sum()
        )
        diagonal = torch.expm1(-row_loss) + torch.expm1(-column_loss)
        return Softmax(rows, columns, diagonal.to(dtype), loss_sum)

    def negatives(self, texts: Blocks) -> tuple[Tensor, Tensor]:
        """Log-sum-exps over the negatives of own images and own texts, float64 ``[b]`` each.

        One ``b x B x d`` product; the columns' parts go back to their owners.
        """
        call, dtype = self.call, self.call.agreed.compute_dtype
        row_lse = call.x.new_full((len(call.x),), -math.inf, dtype=torch.float64)
        parts: list[Tensor] = [row_lse] * call.exchange.world_size
        for rank, y in texts:
            row_part, column_part = self.pairs.logsumexps(self._block(call.x, y, rank), rank)
            row_lse = torch.logaddexp(row_lse, row_part)
            parts[rank] = column_part.to(dtype)
        return row_lse, call.exchange.return_columns(parts).double().logsumexp(0)

    def gradients(
        self, softmax: Softmax, texts: Blocks, images: Blocks | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute ``dX`` and ``dY`` of own rows, up to the factor ``scale/2B``.

        The own block is computed once and serves both. ``images`` is None when ``dY`` is not
        wanted. Features that were gathered are at hand; those of a ring come round again.
        """
        call, mine = self.call, self.call.exchange.rank
        dx = call.zeros(len(call.x), call.want_image_side)
        dy = call.zeros(len(call.y), call.want_text_side)
        if dx is not None:
            for rank, y in texts:
                self._add(softmax, y, rank, dx, dy if rank == mine else None)
        elif dy is not None:
            self._add(softmax, call.y, mine, None, dy)
        if dy is not None and images is not None:
            for rank, x in images:
                if rank != mine:
                    self._add_transposed(softmax, x, rank, dy)
        return dx, dy

    def partial_gradients(self, softmax: Softmax, texts: Blocks) -> tuple[Tensor | None, Tensor]:
        """Compute ``dX`` of own rows and this rank's part of every ``dY`` ([W, max n, d]).

        The parts of a rank's ``dY``, summed over ranks, are its ``dY``; no communication here.
        """
        call = self.call
        dx = call.zeros(len(call.x), call.want_image_side)
        sizes = call.agreed.sizes
        flat = call.zeros(len(sizes) * max(sizes), wanted=True)
        assert flat is not None
        parts = flat.view(len(sizes), max(sizes), -1)
        for rank, y in texts:
            self._add(softmax, y, rank, dx, parts[rank, : sizes[rank]])
        return dx, parts

    def _add(
        self, softmax: Softmax, y: Tensor, rank: int, dx: Tensor | None, dy: Tensor | None
    ) -> None:
        self.pairs.add_gradients_(
            self._block(self.call.x, y, rank),
            rank,
            row_lse=softmax.rows[self.call.exchange.rank],
            column_lse=softmax.columns[rank],
            diagonal=softmax.diagonal,
            dx=dx,
            dy=dy,
        )

    def _add_transposed(self, softmax: Softmax, x: Tensor, rank: int, dy: Tensor) -> None:
        """Add the part of another rank's images to ``dY``: own texts are the rows here."""
        self.pairs.add_gradients_(
            self._block(self.call.y, x, rank),
            None,
            row_lse=softmax.columns[self.call.exchange.rank],
            column_lse=softmax.rows[rank],
            diagonal=softmax.diagonal,
            dx=dy,
            dy=None,
        )

    def _block(self, own: Tensor, other: Tensor, rank: int) -> Block:
        mine = self.call.exchange.rank
        if self.indices is None:
            return Block(own, other, rank == mine)
        return Block(own, other, rank == mine, self.indices[mine], self.indices[rank])

    def _share(
        self, row_lse: Tensor, column_lse: Tensor, loss_sum: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Gather ``r``, ``c`` and the loss of all ranks, in one message."""
        sizes = self.call.agreed.sizes
        own = torch.cat([row_lse, column_lse, loss_sum[None]]).to(self.call.agreed.compute_dtype)
        gathered = self.call.exchange.gather_vectors(own, [2 * size + 1 for size in sizes])
        split = [
            torch.split(part, [size, size, 1]) for part, size in zip(gathered, sizes, strict=True)
        ]
        rows, columns, losses = (list(parts) for parts in zip(*split, strict=True))
        return rows, columns, torch.cat(losses).sum()
