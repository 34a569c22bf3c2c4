"""How much weight a new estimate has in FastCLIP's running means, over training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GammaSchedule = Literal["cosine", "constant", "visits"]


@dataclass(frozen=True)
class Gamma:
    """From 1 (no memory) down to ``minimum`` over ``decay_epochs``.

    ``cosine`` counts fractional epochs of the run, ``visits`` those of each sample, ``constant``
    starts at the minimum. ``by_epoch`` is the released code's rule: whole epochs, and 1 throughout
    the first one.
    """

    minimum: float
    schedule: GammaSchedule
    decay_epochs: float
    by_epoch: bool

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "constant", "visits"):
            raise ValueError(
                f'gamma_schedule must be "cosine", "constant" or "visits", got {self.schedule!r}'
            )
        if not 0.01 <= self.minimum <= 1:  # weights of negatives reach 1/gamma
            raise ValueError(f"gamma_min {self.minimum:g}: must be from 0.01 to 1")
        if self.decay_epochs <= 0:
            raise ValueError(f"gamma_decay_epochs {self.decay_epochs:g}: must be positive")

    def at(self, epoch: float, visits: Tensor) -> Tensor:
        """Weights ``[B]`` (float64) of samples visited so often before, in this epoch."""
        passed = torch.full(visits.shape, epoch, dtype=torch.float64, device=visits.device)
        if self.schedule == "visits":
            passed = visits.double()
        elif self.by_epoch:
            passed = passed.floor()
        progress = (passed / self.decay_epochs).clamp(max=1.0)
        gamma = self.minimum + (1 - self.minimum) * 0.5 * (1 + torch.cos(math.pi * progress))
        if self.schedule == "constant":
            gamma = torch.full_like(passed, self.minimum)
        return torch.where(passed < 1, 1.0, gamma) if self.by_epoch else gamma
