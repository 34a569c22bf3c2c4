"""Adam over v2's individual temperatures: one state per sample and modality, in the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.sample_state import VISITS

SIDES = ("image", "text")
# Columns of the table and their starting values; the temperatures' own start is tau_init.
TAU_COLUMNS = {
    f"{kind}_{side}": 0.0
    for kind in ("tau", "tau_first_moment", "tau_second_moment")
    for side in SIDES
}


@dataclass(frozen=True)
class TauAdam:
    """Adam with bounds. ``by_epoch``: the released code's count, with betas 0 in epoch 0."""

    lr: float
    tau_min: float
    tau_max: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    by_epoch: bool = False

    def step(self, old: Mapping[str, Tensor], gradient: Tensor, *, epoch: int) -> dict[str, Tensor]:
        """New temperatures and moments, each ``[B]``, from ``gradient`` ``[2, B]``.

        ``old`` holds the columns before the step, and the visits before it. Exact mode counts a
        sample's own visits.
        """
        beta1, beta2 = self.beta1, self.beta2
        count = old[VISITS].double() + 1
        if self.by_epoch:
            count = torch.full_like(count, epoch + 1)
            if epoch == 0:
                beta1 = beta2 = 0.0
        changes = {}
        for side, slope in zip(SIDES, gradient, strict=True):
            first = beta1 * old[f"tau_first_moment_{side}"].double() + (1 - beta1) * slope
            second = beta2 * old[f"tau_second_moment_{side}"].double() + (1 - beta2) * slope**2
            unbiased = (second / (1 - beta2**count)).sqrt() + self.eps
            tau = old[f"tau_{side}"].double() - self.lr * first / (1 - beta1**count) / unbiased
            changes[f"tau_{side}"] = tau.clamp(self.tau_min, self.tau_max)
            changes[f"tau_first_moment_{side}"] = first
            changes[f"tau_second_moment_{side}"] = second
        return changes
