"""Parameter groups, the optimizer and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

OptimizerName = Literal["adamw", "lamb", "lion", "sgdm"]


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its groups (open_clip's) and the learning rate."""

    name: OptimizerName = "adamw"
    """Optimizer: adamw and sgdm are torch's, lamb and lion timm's; nothing is compiled."""

    lr: float = 5e-4
    """Peak learning rate."""

    min_lr: float = 0.0
    """Learning rate towards which the schedule falls: it would have it one step after the last."""

    warmup_steps: int = 2000
    """Optimizer steps of linear warm-up."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""

    beta1: float = 0.9
    """Decay of the first moment; sgdm's momentum."""

    beta2: float = 0.98
    """Decay of the second moment (lion: of its momentum)."""

    eps: float = 1e-6
    """Epsilon of adamw and lamb."""

    weight_decay: float = 0.2
    """Weight decay of matrices (coupled for sgdm, decoupled for the others); gains, biases and
    temperature have none."""

    max_grad_norm: float | None = None
    """Clip the global gradient norm of the encoders to this; no clipping when not given. The
    temperature is not part of the norm and is not clipped."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.min_lr < 0 or self.min_lr > self.lr:
            raise ValueError(
                f"--optim.lr {self.lr:g} and --optim.min_lr {self.min_lr:g}: need 0 <= min_lr <= lr"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"--optim.warmup_steps {self.warmup_steps}: must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"--optim.{name} {value:g}: must be at least 0 and below 1")
        for name in ("eps", "weight_decay"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"--optim.{name} {value:g}: must not be negative")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(
                f"--optim.max_grad_norm {self.max_grad_norm:g}: must be positive; leave it out "
                "for no clipping"
            )


def learning_rate(config: OptimConfig, step: int, total_steps: int, *, peak: float) -> float:
    """Learning rate of optimizer step ``step`` (0-based, counting taken steps only).

    Linear warm-up to ``peak`` at step ``warmup_steps - 1``, then the schedule; the minimum
    scales with ``peak``.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    lowest = config.min_lr * peak / config.lr
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "linear":
        return peak + (lowest - peak) * progress
    return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: no decay for vectors and scalars, decay for the rest.

    Vectors are gains and biases: open_clip's rule, without its matching on names.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(config: OptimConfig, groups: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer over ``groups`` (parameters or group dictionaries); no decay of its own.

    LAMB scales each tensor's step by its trust ratio (1 where there is no decay); it needs whole
    tensors, so ZeRO stages 1 to 3, which hand out flat slices, refuse it.
    """
    betas = (config.beta1, config.beta2)
    if config.name == "adamw":
        # fused: one kernel without temporaries, which torch brings compiled, for the CPU too.
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=betas, eps=config.eps, weight_decay=0.0, fused=True
        )
    if config.name == "sgdm":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1, weight_decay=0.0)
    from timm.optim import Lamb, Lion

    if config.name == "lion":
        lion: torch.optim.Optimizer = Lion(groups, lr=config.lr, betas=betas, weight_decay=0.0)
        return lion
    lamb: torch.optim.Optimizer = Lamb(
        groups,
        lr=config.lr,
        betas=betas,
        eps=config.eps,
        weight_decay=0.0,
        max_grad_norm=None,  # timm's default clips; clipping is ours
    )
    return lamb


def build_temperature_optimizer(
    config: OptimConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same kind for the temperature; without momentum for sgdm and as AdamW for LAMB.

    A trust ratio is meant for matrices, and momentum on one scalar overshoots its bounds.
    """
    if config.name == "sgdm":
        return torch.optim.SGD(parameters, lr=config.lr)
    name: OptimizerName = "adamw" if config.name == "lamb" else config.name
    return build_optimizer(replace(config, name=name), parameters)


def step_tensor(optimizer: torch.optim.Optimizer, parameter: Tensor, steps: int) -> Tensor:
    """The count of steps in a parameter's state: fused kernels want it on their device."""
    is_fused = optimizer.defaults.get("fused")
    return torch.tensor(float(steps), device=parameter.device if is_fused else "cpu")


def set_step_count(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the count of steps where an optimizer keeps it in its groups, as timm's LAMB does."""
    if type(optimizer).__name__ == "Lamb":
        for group in optimizer.param_groups:
            group["step"] = torch.tensor(float(steps))


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the rate of every group (also through DeepSpeed's optimizer wrappers)."""
    for group in optimizer.param_groups:
        group["lr"] = lr
