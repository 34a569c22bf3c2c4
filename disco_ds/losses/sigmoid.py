"""SigLIP on tiles: value and weights in one pass, no scalar from any other rank.

With ``z = scale <x_i, y_j> + bias``: ``M_ij = sigmoid(z_ij)``, ``M_ii = -sigmoid(-z_ii)``, and the
value is the sum of ``softplus(z_ij)`` and ``softplus(-z_ii)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from disco_ds.losses.pairwise import Block, PairwiseEngine, add_products_


@dataclass(frozen=True)
class SigmoidPairs:
    """The pass over a block."""

    engine: PairwiseEngine
    scale: float
    bias: float

    def add_gradients_(
        self, block: Block, *, dx: Tensor | None, dy: Tensor | None, sums: Tensor | None
    ) -> None:
        """Add ``M Y`` to ``dx``, ``M^T X`` to ``dy`` and (value, sum of M) to ``sums``.

        ``dx`` [n, d], ``dy`` [m, d], ``sums`` [2] in float64; each may be None. One product for
        the logits, one per gradient.
        """
        for tile in self.engine.tiles(block):
            z = self.engine.logits(tile, self.scale).add_(self.bias)
            # A positive pair is a negative one with the sign of its logit changed.
            positives = tile.diagonal(z)
            if positives is not None:
                positives.neg_()
            value = None
            if sums is not None:
                value = -logsigmoid(torch.neg(z, out=self.engine.buffer(1, tile.shape))).sum()
            weights = z.sigmoid_()
            if positives is not None:
                positives.neg_()
            if sums is not None and value is not None:
                sums += torch.stack([value.double(), weights.sum().double()])
            if dx is not None or dy is not None:
                add_products_(weights, tile, dx, dy)
