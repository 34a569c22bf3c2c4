"""What each version of FastCLIP makes of a batch's normalisers: value and temperature gradients.

:data:`OBJECTIVES` has one class per version and mode. The exact ones state the objectives of
``fastclip.py``; the released ones what the released code computes in their place: half of the
feature gradients, a surrogate as the value, and for v2 and v3 another temperature gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Version = Literal["v0", "v1", "v2", "v3"]
Mode = Literal["exact", "fastclip_compat"]


@dataclass(frozen=True)
class Batch:
    """Scalars of a global batch, equal on all ranks; rows of ``[2, B]``: image, text anchors."""

    index: Tensor
    taus: Tensor  # [2, B]
    log_counts: Tensor  # [B], log of the number of negatives
    positives: Tensor  # [B], s_ii
    log_g: Tensor  # [2, B], log of the mean of exp(h/tau)
    log_u: Tensor  # [2, B], after the update
    log_eps: Tensor  # [2, B]

    @property
    def log_eps_u(self) -> Tensor:
        """``log(eps + u)``, ``[2, B]``."""
        return torch.logaddexp(self.log_eps, self.log_u)

    @property
    def sums(self) -> Tensor:
        """``sum_j p_ij = g/(eps + u)``, ``[2, B]``."""
        return (self.log_g - self.log_eps_u).exp()


@dataclass(frozen=True)
class Objective:
    """v1, exact: ``tau mean_i [L1_i + L2_i]`` with a constant tau. The others are variants."""

    rho: float

    times_tau = True
    """The objective carries the factor tau, which cancels the 1/tau of ``exp(h/tau)``."""
    feature_weight = 1.0
    """How much of the feature gradient is taken."""
    eps_grows = False
    """eps grows with the largest ``h/tau`` that a sample has met."""

    def value(self, batch: Batch) -> Tensor:
        """The objective on this batch; 0-D."""
        return (batch.taus * batch.log_eps_u).mean(1).sum()

    def tau_slope(self, batch: Batch, own: slice, energy: Tensor) -> Tensor:
        """This rank's share of ``d/d(tau)``, 0-D: the ranks' shares add up to the whole.

        ``own`` are this rank's samples and ``energy`` its part of ``sum p h/tau / B``.
        """
        return torch.zeros_like(energy)

    def tau_slopes(self, batch: Batch, own: slice, energies: Tensor) -> Tensor:
        """``B d/d(tau_i)`` of own samples' temperatures, ``[2, b]``, from ``sum_j p_ij h_ij``."""
        raise NotImplementedError


class V0(Objective):
    """``mean_i [L1_i + L2_i]``."""

    times_tau = False

    def value(self, batch: Batch) -> Tensor:
        """See :class:`Objective`."""
        return batch.log_eps_u.mean(1).sum()

    def tau_slope(self, batch: Batch, own: slice, energy: Tensor) -> Tensor:
        """See :class:`Objective`."""
        return -energy / batch.taus[0, 0]


class V2(Objective):
    """``mean_i [tau1_i (L1_i + rho) + tau2_i (L2_i + rho)]``."""

    def value(self, batch: Batch) -> Tensor:
        """See :class:`Objective`."""
        return (batch.taus * (batch.log_eps_u + self.rho)).mean(1).sum()

    def tau_slopes(self, batch: Batch, own: slice, energies: Tensor) -> Tensor:
        """See :class:`Objective`."""
        return batch.log_eps_u[:, own] + self.rho - energies / batch.taus[:, own]


class V3(V2):
    """``tau mean_i [L1_i + L2_i] + 2 rho tau``: v2 with one temperature for all."""

    def tau_slope(self, batch: Batch, own: slice, energy: Tensor) -> Tensor:
        """See :class:`Objective`."""
        return _mean_share(batch, batch.log_eps_u + self.rho, own) - energy


class ReleasedV1(Objective):
    """The surrogate whose half gradient the released code follows: ``sum_j p_ij``."""

    times_tau = False
    feature_weight = 0.5

    def value(self, batch: Batch) -> Tensor:
        """See :class:`Objective`."""
        return batch.sums.mean(1).sum()


class ReleasedV0(ReleasedV1):
    """v0's temperature gradient is not halved."""

    def tau_slope(self, batch: Batch, own: slice, energy: Tensor) -> Tensor:
        """See :class:`Objective`."""
        return -energy / batch.taus[0, 0]


class ReleasedV2(ReleasedV1):
    """No factor tau, clamped temperature gradients."""

    eps_grows = True

    def tau_slopes(self, batch: Batch, own: slice, energies: Tensor) -> Tensor:
        """See :class:`Objective`."""
        return V2(self.rho).tau_slopes(batch, own, energies).clamp(-5, 5)


class ReleasedV3(ReleasedV1):
    """Half of the logarithms and of rho in the temperature gradient, all of its data term."""

    times_tau = True

    def value(self, batch: Batch) -> Tensor:
        """See :class:`Objective`."""
        logs = 0.5 * batch.log_u.mean(1).sum()
        value: Tensor = batch.taus[0, 0] * (batch.sums.mean(1).sum() + self.rho + logs)
        return value

    def tau_slope(self, batch: Batch, own: slice, energy: Tensor) -> Tensor:
        """See :class:`Objective`."""
        return _mean_share(batch, 0.5 * (batch.log_u + self.rho), own) - energy


def _mean_share(batch: Batch, values: Tensor, own: slice) -> Tensor:
    """This rank's part of ``mean_i`` over both kinds of anchors, added up."""
    return values[:, own].sum() / len(batch.index)


OBJECTIVES: dict[tuple[Version, Mode], type[Objective]] = {
    ("v0", "exact"): V0,
    ("v1", "exact"): Objective,
    ("v2", "exact"): V2,
    ("v3", "exact"): V3,
    ("v0", "fastclip_compat"): ReleasedV0,
    ("v1", "fastclip_compat"): ReleasedV1,
    ("v2", "fastclip_compat"): ReleasedV2,
    ("v3", "fastclip_compat"): ReleasedV3,
}
