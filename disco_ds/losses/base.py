"""What every contrastive loss has in common: the call, the gradient rule, a few no-op hooks.

The losses compute their gradients together with their value, while the features of the other ranks
are at hand, and keep only those gradients. So nothing of size ``b x B`` and no gathered feature
outlives the forward call, and the backward call neither communicates nor multiplies matrices.

Shape letters of this package: ``b`` pairs of this rank, ``W`` ranks, ``B`` pairs of all ranks,
``d`` embedding size, ``t`` tile size.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from disco_ds.losses.attach import attach_gradients
from disco_ds.losses.exchange import Blocks, Exchange
from disco_ds.losses.inputs import FLOAT_DTYPES, Agreement, Header, agree
from disco_ds.losses.kernels import Kernel
from disco_ds.losses.pairwise import PairwiseEngine, default_tile_size, row_dots

Gather = Literal["all", "ring"]
WireDtype = Literal["fp32", "bf16", "fp16"]
Output = Tensor | dict[str, Tensor]

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Call:
    """One call of a loss, agreed on by all ranks: everything that its value depends on.

    ``x`` and ``y`` ([b, d]) are the image and text features as they travel: every rank uses the
    same rounded copies, its own rows included.
    """

    x: Tensor
    y: Tensor
    index: Tensor | None
    agreed: Agreement
    exchange: Exchange
    engine: PairwiseEngine
    gather: Gather

    @property
    def want_image_side(self) -> bool:
        """Compute ``dX``: for the images, or because the scalars' gradients come out of it."""
        return self.agreed.need_image or (self.agreed.need_scalars and not self.agreed.need_text)

    @property
    def want_text_side(self) -> bool:
        """Compute ``dY``."""
        return self.agreed.need_text

    def stream(self, own: Tensor) -> Blocks:
        """Stream ``own`` ([b, d]) and its counterparts on the other ranks."""
        return self.exchange.stream(own, self.agreed.sizes, self.gather)

    def zeros(self, rows: int, wanted: bool) -> Tensor | None:
        """Return a gradient accumulator ([rows, d], compute dtype) if it is wanted."""
        if not wanted:
            return None
        return self.x.new_zeros(rows, self.agreed.dim, dtype=self.agreed.compute_dtype)


@dataclass(frozen=True)
class Result:
    """What a loss computed; gradients lack the factors ``coefficient`` and ``logit_scale``.

    ``scale_gradient`` (0-D), where the loss has its own rule, is this rank's share of
    ``d(value)/d(logit_scale)``.

    ``dx`` is ``M Y`` and ``dy`` is ``M^T X`` for this rank's rows ([b, d], compute dtype);
    ``weight_sum`` is the sum of ``M`` over this rank's rows (0-D), None where it is 0 by algebra.
    """

    value: Tensor
    coefficient: float
    dx: Tensor | None
    dy: Tensor | None
    weight_sum: Tensor | None = None
    scale_gradient: Tensor | None = None


class ContrastiveLoss(nn.Module):
    """Base of the losses; a subclass computes a :class:`Result` from a :class:`Call`.

    Gradient rule: with ``W`` ranks in the process group, leaf gradients are
    ``W * d(global loss)/d(leaf)`` (for scalars: ``W`` times this rank's share), so that the mean
    over ranks, which DDP, FSDP2, ZeRO and accelerate take, is the exact full-batch gradient. The
    value is the true global loss, the same number on all ranks.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        gather: Gather = "all",
        tile_size: int | None = None,
        kernel: Kernel = "auto",
        wire_dtype: torch.dtype | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        if gather not in ("all", "ring"):
            raise ValueError(f'gather must be "all" or "ring", got {gather!r}')
        if kernel not in ("auto", "torch", "triton"):
            raise ValueError(f'kernel must be "auto", "torch" or "triton", got {kernel!r}')
        if tile_size is not None and tile_size < 1:
            raise ValueError(f"tile_size must be at least 1 or None, got {tile_size}")
        if wire_dtype is not None and wire_dtype not in FLOAT_DTYPES:
            raise ValueError(f"wire_dtype must be a float dtype or None, got {wire_dtype}")
        self.process_group = process_group
        self.gather: Gather = gather
        self.tile_size = tile_size
        self.kernel: Kernel = kernel
        self.wire_dtype = wire_dtype
        self.normalize = normalize
        self.exchange_type: type[Exchange] = Exchange  # what a comm hook may replace
        self._metrics: dict[str, float | Tensor] = {}

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        *,
        index: Tensor | None = None,
        output_dict: bool = False,
    ) -> Output:
        """Return the loss over the pairs of all ranks.

        Args:
            image_features: ``[b, d]``, unit rows unless ``normalize``; any float dtype, any b >= 1.
            text_features: ``[b, d]``, row i belongs to row i of the images; its own float dtype.
            logit_scale: linear (already exponentiated), 0-D or ``[1]``, equal on all ranks.
            logit_bias: 0-D or ``[1]``, or None; a shift of all logits.
            index: int64 ``[b]``, ids of the samples, on any device.
            output_dict: return ``{"contrastive_loss": value}``, as open_clip's losses do.

        Returns:
            The true global loss, fp32 (float64 for float64 features), the same on all ranks.

        Raises:
            ValueError: on every rank, naming the rank whose shape, dtype or scale does not fit.
        """
        if isinstance(index, Tensor):
            index = index.to(image_features.device)
        if self.normalize:
            image_features, text_features = _unit(image_features), _unit(text_features)
        header = Header.of_call(image_features, text_features, logit_scale, logit_bias, index)
        with torch.no_grad(), torch.autocast(image_features.device.type, enabled=False):
            call = self._agree(header, image_features, text_features, index)
            self._metrics = {"chance_level": self._chance_level(call.agreed.global_batch_size)}
            result = self._compute(call)
            gradients = _finish(call, result)
        leaves = (image_features, text_features, logit_scale, logit_bias)
        pairs = [
            (leaf, gradient.reshape(leaf.shape).to(leaf.device))
            for leaf, gradient in zip(leaves, gradients, strict=True)
            if isinstance(leaf, Tensor) and gradient is not None
        ]
        value = attach_gradients(result.value, pairs)
        return {"contrastive_loss": value} if output_dict else value

    @abstractmethod
    def _compute(self, call: Call) -> Result:
        """Compute the value, and the sides ``call`` wants."""

    def _chance_level(self, global_batch_size: int) -> float:
        """Return the value for features that tell nothing apart."""
        return math.log(global_batch_size)

    def metrics(self) -> dict[str, float | Tensor]:
        """Return detached scalars of the last call, to log. Empty before the first call."""
        return dict(self._metrics)

    def set_progress(self, epoch: float) -> None:
        """Tell the loss how far training is, in epochs; for losses with a schedule."""

    def after_step(self, skipped: bool) -> None:
        """Commit what the last call estimated, unless the optimizer step was skipped."""

    def temperature_lr(self, scheduled: float) -> float:
        """Learning rate of the temperature: the schedule's, unless the loss has its own rule."""
        return scheduled

    def rank_state(self) -> dict[str, Tensor]:
        """What this rank must save beside the model: per-sample state. Nothing by default."""
        return {}

    def load_rank_states(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over the :meth:`rank_state` of all ranks of the run that saved."""

    def extra_repr(self) -> str:
        """Show the options that differ between instances."""
        return f"gather={self.gather!r}, kernel={self.kernel!r}, wire_dtype={self.wire_dtype}"

    def _agree(
        self, header: Header, image_features: Tensor, text_features: Tensor, index: Tensor | None
    ) -> Call:
        """Exchange headers, then round the features to what travels."""
        exchange = self.exchange_type(self.process_group)
        device = image_features.device
        rows = exchange.all_rows(header.row(), device)
        agreed = agree([Header(*row) for row in rows])
        tile_size = self.tile_size or default_tile_size(device)
        return Call(
            x=self._as_sent(image_features),
            y=self._as_sent(text_features),
            index=index,
            agreed=agreed,
            exchange=exchange,
            engine=PairwiseEngine(tile_size, agreed.compute_dtype, device),
            gather=self.gather,
        )

    def _as_sent(self, features: Tensor) -> Tensor:
        return features.detach().to(self.wire_dtype or features.dtype).contiguous()


def _unit(features: Tensor) -> Tensor:
    """Normalise rows in fp32 at least (fp16 overflows in the norm), unless they will be refused."""
    if features.ndim != 2 or not features.is_floating_point():
        return features
    if features.dtype in (torch.bfloat16, torch.float16):
        features = features.float()
    return F.normalize(features, dim=-1)


def _finish(call: Call, result: Result) -> tuple[Tensor | None, ...]:
    """Return the gradients of images, texts, scale and bias under the gradient rule.

    ``d/d(scale)`` is ``sum_i <x_i, (M Y)_i>``, from the image side on every rank or from the text
    side on every rank: they agree over the batch, not rank by rank.
    """
    factor = call.exchange.world_size * result.coefficient
    scale_gradient = bias_gradient = None
    side = (call.x, result.dx) if result.dx is not None else (call.y, result.dy)
    if side[1] is not None and call.agreed.need_scalars:
        scale_gradient = row_dots(side[0], side[1]).sum() * factor
        if result.scale_gradient is not None:
            scale_gradient = result.scale_gradient * call.exchange.world_size
        weight_sum = result.weight_sum
        bias_gradient = scale_gradient * 0 if weight_sum is None else weight_sum * factor
    for gradient in (result.dx, result.dy):
        if gradient is not None:
            gradient.mul_(factor * call.agreed.scale)
    return result.dx, result.dy, scale_gradient, bias_gradient
