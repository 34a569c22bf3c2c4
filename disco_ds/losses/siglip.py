"""SigLIPLoss: the pairwise sigmoid loss over the global batch, in tiles.

``L = -(1/B) sum_ij log sigmoid(y_ij z_ij)`` with ``z = scale <x_i, y_j> + bias``, ``y_ii = 1`` and
-1 elsewhere (Zhai et al., ICCV 2023, arXiv 2303.15343). The sum of all pairs is divided by the
number of samples, not of pairs. No softmax couples the ranks: every term needs two features only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.losses.base import (
    WIRE_DTYPES,
    Call,
    ContrastiveLoss,
    Gather,
    Result,
    WireDtype,
)
from disco_ds.losses.kernels import Kernel, sigmoid_passes
from disco_ds.losses.pairwise import Block


class SigLIPLoss(ContrastiveLoss):
    """Pairwise sigmoid loss over the features of all ranks.

    Called as open_clip's ``SigLipLoss``; see :class:`ContrastiveLoss` for the gradient rule and
    its ``forward`` for the arguments. Initialise the bias from the global batch, about
    ``-log(B - 1)``.

    Communication, all of it in forward (bytes received per rank, times ``(W - 1) / W``, ``s`` bytes
    per element): all-gather or ring of texts and of images, ``2 s B d``; one number per rank of the
    loss; 15 float64 per rank to check the call.

    Products of size ``b x B x d``: ``4 - 1/W``. Memory: the gathered features (``gather="ring"``:
    three blocks), two fp32 gradients [b, d] and two tiles; see ``DiscoLoss`` for ``tile_size``.

    Args:
        process_group: ranks that form the global batch; None is the default group, or one process.
        gather: ``"ring"`` streams the features of the others and keeps O(b d) memory.
        tile_size: rows and columns of a tile.
        kernel: ``"triton"`` needs a GPU; ``"auto"`` takes it where it can.
        wire_dtype: dtype of features on the wire, None for their own.
        normalize: normalise rows in fp32 first; gradients are those of the given features.
    """

    def _compute(self, call: Call) -> Result:
        pairs = sigmoid_passes(
            self.kernel, call.engine, scale=call.agreed.scale, bias=call.agreed.bias
        )
        mine = call.exchange.rank
        texts = call.stream(call.y)
        images = call.stream(call.x) if call.want_text_side else []
        dx = call.zeros(len(call.x), call.want_image_side)
        dy = call.zeros(len(call.y), call.want_text_side)
        sums = call.x.new_zeros(2, dtype=torch.float64)  # value, sum of M
        for rank, y in texts:
            block = Block(call.x, y, is_own=rank == mine)
            pairs.add_gradients_(block, dx=dx, dy=dy if rank == mine else None, sums=sums)
        for rank, x in images:
            if dy is not None and rank != mine:
                pairs.add_gradients_(Block(call.y, x, is_own=False), dx=dy, dy=None, sums=None)
        dtype, coefficient = call.agreed.compute_dtype, 1 / call.agreed.global_batch_size
        shares = call.exchange.gather_vectors(sums[:1].to(dtype), [1] * len(call.agreed.sizes))
        value: Tensor = torch.cat(shares).sum() * coefficient
        return Result(value, coefficient, dx, dy, sums[1])

    def _chance_level(self, global_batch_size: int) -> float:
        """Return the lowest value of equal logits: ``sigmoid(z) = 1/B`` for every pair."""
        negatives = global_batch_size - 1
        return math.log(global_batch_size) - negatives * math.log1p(-1 / global_batch_size)


@dataclass(frozen=True)
class SigLIPConfig:
    """Settings of :class:`SigLIPLoss`."""

    name: Literal["siglip"] = "siglip"
    """Pairwise sigmoid loss over the global batch, in tiles."""
    gather: Gather = "all"
    """all: gather the features once and keep them; ring: stream them, memory O(b d)."""
    tile_size: int | None = None
    """Rows and columns of a tile of logits; None picks one."""
    kernel: Kernel = "auto"
    """torch, triton (GPU), or auto: triton where it can run."""
    wire_dtype: WireDtype | None = None
    """Dtype of features on the wire; None sends them as they are."""

    def build(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        normalize: bool = False,
        num_samples: int | None = None,
    ) -> SigLIPLoss:
        """Make the loss for a process group; the size of the data set does not matter to it."""
        return SigLIPLoss(
            process_group=process_group,
            gather=self.gather,
            tile_size=self.tile_size,
            kernel=self.kernel,
            wire_dtype=None if self.wire_dtype is None else WIRE_DTYPES[self.wire_dtype],
            normalize=normalize,
        )
