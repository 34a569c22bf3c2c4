"""DiscoLoss: exact InfoNCE over the global batch from one rank's rows, in tiles.

``L = (1/2B) sum_i (delta_r_i + delta_c_i)``, the mean of both directions' cross-entropies. The
decomposition is DisCo-CLIP's (Chen et al., CVPR 2023, arXiv 2304.08480): the gradient of a rank's
own features needs its own softmaxes and the other ranks' softmaxes over the same pairs. DisCo-CLIP
fetches the second part as feature gradients, by an all-reduce; here the scalars that define it, one
log-sum-exp per sample and direction, are gathered instead (FastCLIP's way, arXiv 2407.01445,
without its moving average), and no gradient of a feature ever travels.
"""

from __future__ import annotations

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
from disco_ds.losses.info_nce import InfoNCE
from disco_ds.losses.inputs import duplicate_rate
from disco_ds.losses.kernels import Kernel, softmax_passes

GradientReduction = Literal["scalar_gather", "reduce_scatter", "all_reduce"]
Positives = Literal["position", "index"]

# With tile_size=None, tiles up to this size together are kept from the first pass for the second.
KEPT_TILES_BYTES = 64 * 2**20


class DiscoLoss(ContrastiveLoss):
    """Symmetric InfoNCE (the CLIP loss) over the features of all ranks.

    Called as open_clip's ``ClipLoss``; see :class:`ContrastiveLoss` for the gradient rule and
    :meth:`ContrastiveLoss.forward` for the arguments. ``logit_bias`` is accepted and gets an exact
    zero gradient: InfoNCE does not change when all logits shift.

    Communication, all of it in forward (``s`` bytes per element of a feature on the wire, 4 or 8
    per scalar; bytes received per rank, times ``(W - 1) / W``; one more all-gather of 15 float64
    per rank checks the call):

    =====================================  ==================================================
    ``scalar_gather``, ``gather="all"``    2 all-gathers, ``2 s B d``; all-to-all ``4 B`` and
                                           all-gather ``8 B`` of scalars
    ``scalar_gather``, ``gather="ring"``   texts go round twice and images once: ``3 s B d``,
                                           and the same scalars
    ``reduce_scatter``                     all-gather of texts ``s B d``, reduce-scatter of
                                           their gradients ``4 B d``, the same scalars
    ``all_reduce``                         the same with an all-reduce: ``s B d + 8 B d``
    =====================================  ==================================================

    Products of size ``b x B x d``: one for the log-sum-exps, one per gradient, and what is computed
    again, ``2 - 1/W`` at most (``scalar_gather``) or 1 (the others).

    Memory of a call: the gathered features (``gather="ring"``: three blocks), two fp32 gradients
    [b, d] (``reduce_scatter`` and ``all_reduce``: one of them [B, d] until it is reduced), two
    tiles, O(B) scalars, and kept tiles. ``tile_size=None`` picks 1024 on CPU (tiles of 4 MiB) and
    2048 elsewhere (16 MiB), and keeps tiles from the first pass for the second while they fit into
    64 MiB. A given ``tile_size`` keeps none. Saved for backward: the gradients, [b, d] each.

    Args:
        process_group: ranks that form the global batch; None is the default group, or one process.
        gradient_reduction: how the other ranks' part of a gradient arrives. Same gradients,
            different bytes.
        gather: ``"ring"`` streams the features of the others and keeps O(b d) memory.
        tile_size: rows and columns of a tile.
        kernel: ``"triton"`` needs a GPU; ``"auto"`` takes it where it can.
        wire_dtype: dtype of features on the wire, None for their own.
        normalize: normalise rows in fp32 first; gradients are those of the given features.
        positives: ``"index"``: pairs of equal ``index`` are not each other's negatives.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        gradient_reduction: GradientReduction = "scalar_gather",
        gather: Gather = "all",
        tile_size: int | None = None,
        kernel: Kernel = "auto",
        wire_dtype: torch.dtype | None = None,
        normalize: bool = False,
        positives: Positives = "position",
    ) -> None:
        super().__init__(
            process_group=process_group,
            gather=gather,
            tile_size=tile_size,
            kernel=kernel,
            wire_dtype=wire_dtype,
            normalize=normalize,
        )
        if gradient_reduction not in ("scalar_gather", "reduce_scatter", "all_reduce"):
            raise ValueError(
                'gradient_reduction must be "scalar_gather", "reduce_scatter" or "all_reduce", '
                f"got {gradient_reduction!r}"
            )
        if gather == "ring" and gradient_reduction != "scalar_gather":
            raise ValueError(
                f'gather="ring" keeps O(b d) memory, gradient_reduction={gradient_reduction!r} '
                'needs a [B, d] gradient: use gradient_reduction="scalar_gather" with the ring'
            )
        if positives not in ("position", "index"):
            raise ValueError(f'positives must be "position" or "index", got {positives!r}')
        self.gradient_reduction: GradientReduction = gradient_reduction
        self.positives: Positives = positives

    def extra_repr(self) -> str:
        """Show the options that differ between instances."""
        return f"gradient_reduction={self.gradient_reduction!r}, {super().extra_repr()}"

    def _compute(self, call: Call) -> Result:
        indices = self._indices(call)
        wanted = call.want_image_side or call.want_text_side
        budget = KEPT_TILES_BYTES if self.tile_size is None and wanted else 0
        pairs = softmax_passes(self.kernel, call.engine, scale=call.agreed.scale, kept_bytes=budget)
        info_nce = InfoNCE(call, pairs, indices)
        texts = call.stream(call.y)
        by_scalars = self.gradient_reduction == "scalar_gather" or not call.want_text_side
        images = call.stream(call.x) if by_scalars and call.want_text_side else None
        softmax = info_nce.first_pass(texts)
        if by_scalars:
            dx, dy = info_nce.gradients(softmax, texts, images)
        else:
            dx, parts = info_nce.partial_gradients(softmax, texts)
            dy = self._reduce(call, parts)
        coefficient = 1 / (2 * call.agreed.global_batch_size)
        return Result(softmax.loss_sum * coefficient, coefficient, dx, dy)

    def _reduce(self, call: Call, parts: Tensor) -> Tensor:
        if call.exchange.world_size == 1:
            return parts[0]
        if self.gradient_reduction == "reduce_scatter":
            return call.exchange.reduce_scatter(parts, len(call.y))
        return call.exchange.all_reduce(parts, len(call.y))

    def _indices(self, call: Call) -> list[Tensor] | None:
        """Gather ids where they matter: the option is on and the batch has duplicates."""
        if self.positives == "position":
            return None
        if call.index is None:
            raise ValueError('positives="index" needs index, one int64 id per pair')
        indices = call.exchange.gather_vectors(call.index.long(), call.agreed.sizes)
        rate = duplicate_rate(torch.cat(indices))
        self._metrics["duplicate_rate"] = rate
        return indices if rate else None


@dataclass(frozen=True)
class DiscoConfig:
    """Settings of :class:`DiscoLoss`."""

    name: Literal["disco"] = "disco"
    """Exact InfoNCE (the CLIP loss) over the global batch, in tiles."""
    gradient_reduction: GradientReduction = "scalar_gather"
    """How the other ranks' part of a feature gradient arrives: from gathered log-sum-exps
    (fewest bytes), or as gradients by reduce_scatter (fewest products) or all_reduce."""
    gather: Gather = "all"
    """all: gather the features once and keep them; ring: stream them, memory O(b d)."""
    tile_size: int | None = None
    """Rows and columns of a tile of logits; None picks one and keeps tiles up to 64 MiB."""
    kernel: Kernel = "auto"
    """torch, triton (GPU), or auto: triton where it can run."""
    wire_dtype: WireDtype | None = None
    """Dtype of features on the wire; None sends them as they are."""
    positives: Positives = "position"
    """position: only row i matches row i; index: pairs that share an index are not each
    other's negatives."""

    def build(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        normalize: bool = False,
        num_samples: int | None = None,
    ) -> DiscoLoss:
        """Make the loss for a process group; the size of the data set does not matter to it."""
        return DiscoLoss(
            process_group=process_group,
            gradient_reduction=self.gradient_reduction,
            gather=self.gather,
            tile_size=self.tile_size,
            kernel=self.kernel,
            wire_dtype=None if self.wire_dtype is None else WIRE_DTYPES[self.wire_dtype],
            normalize=normalize,
            positives=self.positives,
        )
