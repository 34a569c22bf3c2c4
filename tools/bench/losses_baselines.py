"""The losses that the bench compares, each as ``make(rank, world_size) -> loss(x, y, scale)``.

Baselines are written here from their mathematics, with PyTorch's own collectives, so that one
machine without a GPU can run all of them; open_clip's are its own classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from disco_ds.losses import DiscoLoss, SigLIPLoss

SIGLIP_BIAS = -8.0


@dataclass(frozen=True)
class Provider:
    """One loss of the comparison."""

    name: str
    kind: str  # "infonce" or "siglip"
    make: Callable[[int, int], Callable[..., Tensor]]
    wire_dtype: torch.dtype | None = None
    is_ours: bool = False
    is_global: bool = False  # holds B x B logits on every rank


class _AllReduceGather(torch.autograd.Function):
    """DisCo-CLIP's gather: the gradient of all features is averaged over ranks, then sliced."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        ctx.rows = len(own)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)  # gloo has no AVG
        start = dist.get_rank() * ctx.rows
        return gradient[start : start + ctx.rows] / dist.get_world_size()


class DiscoClip(nn.Module):
    """Local rows against gathered columns, both directions; feature gradients by all-reduce."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        all_x, all_y = _AllReduceGather.apply(x), _AllReduceGather.apply(y)
        labels = torch.arange(len(x)) + dist.get_rank() * len(x)
        images = cross_entropy(scale * all_x[labels] @ all_y.T, labels)
        return (images + cross_entropy(scale * all_y[labels] @ all_x.T, labels)) / 2


class GradCacheDistributed(nn.Module):
    """All rows against all columns on every rank; gradients reach own rows only. Symmetrised."""

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        all_x, all_y = self._gather(x), self._gather(y)
        logits = scale * all_x @ all_y.T
        labels = torch.arange(len(logits))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    def _gather(self, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.detach())
        parts[dist.get_rank()] = own
        return torch.cat(parts)


def _open_clip(rank: int, world_size: int) -> Callable[..., Tensor]:
    from open_clip.loss import ClipLoss

    loss: Callable[..., Tensor] = ClipLoss(
        local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size
    )
    return loss


def _open_clip_siglip(rank: int, world_size: int) -> Callable[..., Tensor]:
    from open_clip.loss import SigLipLoss

    loss = SigLipLoss(rank=rank, world_size=world_size)
    return lambda x, y, scale: loss(x, y, scale, SIGLIP_BIAS)


def _inf_cl(rank: int, world_size: int) -> Callable[..., Tensor]:
    from inf_cl import cal_inf_loss

    return lambda x, y, scale: cal_inf_loss(x, y, scale=scale)


def _disco(**options: Any) -> Callable[[int, int], Callable[..., Tensor]]:
    return lambda rank, world_size: DiscoLoss(**options)


def _siglip(**options: Any) -> Callable[[int, int], Callable[..., Tensor]]:
    def make(rank: int, world_size: int) -> Callable[..., Tensor]:
        loss = SigLIPLoss(**options)
        return lambda x, y, scale: loss(x, y, scale, SIGLIP_BIAS)

    return make


def _baseline(name: str, module: type[nn.Module], *, is_global: bool = False) -> Provider:
    return Provider(name, "infonce", lambda rank, world_size: module(), is_global=is_global)


BF16 = torch.bfloat16
PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("open_clip", "infonce", _open_clip),
        _baseline("disco_clip", DiscoClip),
        _baseline("gradcache", GradCacheDistributed, is_global=True),
        Provider("ours", "infonce", _disco(), is_ours=True),
        Provider("ours_bf16", "infonce", _disco(wire_dtype=BF16), BF16, is_ours=True),
        Provider("ours_ring", "infonce", _disco(gather="ring"), is_ours=True),
        Provider(
            "ours_reduce_scatter",
            "infonce",
            _disco(gradient_reduction="reduce_scatter"),
            is_ours=True,
        ),
        Provider(
            "ours_all_reduce", "infonce", _disco(gradient_reduction="all_reduce"), is_ours=True
        ),
        Provider("open_clip_siglip", "siglip", _open_clip_siglip),
        Provider("ours_siglip", "siglip", _siglip(), is_ours=True),
        Provider("ours_siglip_ring", "siglip", _siglip(gather="ring"), is_ours=True),
    )
}
if torch.cuda.is_available():
    PROVIDERS["inf_cl"] = Provider("inf_cl", "infonce", _inf_cl)
REFERENCES = {"infonce": "open_clip", "siglip": "open_clip_siglip"}
