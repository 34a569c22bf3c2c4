"""BatchNorm of ResNet towers: whose samples it normalises with."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

BatchNormMode = Literal["local", "synced", "frozen"]


class BatchNorm2d(nn.BatchNorm2d):
    """BatchNorm in fp32 whatever its weights' dtype: engines cast weights, but not statistics.

    ``mode``: "local" normalises with the micro-batch of this rank, "synced" with the micro-batches
    of all ranks (then one micro-batch per step equals one process with the whole batch), "frozen"
    with the running statistics, which stay as they are. Synced costs two all-reduces of ``8 C``
    and ``4 C`` bytes in the forward pass and two of ``4 C`` in the backward pass, for C channels.
    """

    mode: BatchNormMode

    def train(self, mode: bool = True) -> BatchNorm2d:
        """Training mode, but for a frozen one, or one in a locked tower."""
        is_locked = self.weight is not None and not self.weight.requires_grad
        super().train(mode and self.mode != "frozen" and not is_locked)
        return self

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``[b, c, h, w]``; the result has the input's dtype."""
        values = input if input.dtype == torch.float64 else input.float()
        weight, bias = (_as(values, p) for p in (self.weight, self.bias))
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.training and self.mode == "synced" and _world_size() > 1:
            return self._synced(values, weight, bias).to(input.dtype)
        return nn.functional.batch_norm(
            values,
            self.running_mean,
            self.running_var,
            weight,
            bias,
            training=self.training or self.running_mean is None,
            momentum=self._momentum(),
            eps=self.eps,
        ).to(input.dtype)

    def _momentum(self) -> float:
        """Weight of this batch in the running statistics; None asks for the mean of all batches."""
        if self.momentum is None and self.num_batches_tracked is not None:
            return 1.0 / max(1, int(self.num_batches_tracked))
        return self.momentum or 0.0

    def _synced(self, values: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        rows = values.new_tensor([values.numel() / values.shape[1]])
        sums = _sum_over_ranks(torch.cat([values.sum((0, 2, 3)), rows]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - _per_channel(mean)
        variance = _sum_over_ranks(centred.square().sum((0, 2, 3))) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        scale = torch.rsqrt(variance + self.eps)
        scale = scale if weight is None else weight * scale
        scaled = centred * _per_channel(scale)
        return scaled if bias is None else scaled + _per_channel(bias)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        momentum = self._momentum()
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        self.running_var.lerp_(variance.to(self.running_var), momentum)


class BatchNormAct2d(BatchNorm2d):
    """With the activation that timm's layer of this name has built in."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``[b, c, h, w]``, then drop and activate."""
        activated: Tensor = self.act(self.drop(super().forward(input)))
        return activated


def use_batch_norm_(model: nn.Module, mode: BatchNormMode) -> None:
    """Turn every ``nn.BatchNorm2d`` of a model, and timm's with an activation, into ours, in place.

    Raises:
        ValueError: another kind of BatchNorm, which could not follow ``mode``.
    """
    for name, module in model.named_modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = BatchNorm2d
        elif type(module).__name__ == "BatchNormAct2d" and isinstance(module, nn.BatchNorm2d):
            module.__class__ = BatchNormAct2d
        if isinstance(module, BatchNorm2d):
            module.mode = mode
            module.train(module.training)
        elif isinstance(module, _BatchNorm) and mode != "local":
            raise ValueError(
                f"--model.batch_norm {mode}: {name} is a {type(module).__name__}, for which only "
                "local is there"
            )


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is an all-reduce: every rank's output depends on every input."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def _sum_over_ranks(values: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(values)
    return total


def _as(values: Tensor, parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.to(values.dtype)


def _per_channel(values: Tensor) -> Tensor:
    return values[None, :, None, None]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
