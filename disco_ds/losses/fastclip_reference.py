"""FastCLIP's estimators and gradients in plain single-process form: what the fast path must equal.

FastCLIP (arXiv 2407.01445) keeps, for every sample, running means ``u`` of the image's and the
text's softmax normaliser over its negatives, and builds its gradient from them. Two modes:

``exact``
    the derivative of the objective that the version states, ``u`` held constant.
``fastclip_compat``
    what the released training code computes: half of the feature gradients, another temperature
    rule for v2 and v3, a shifted and clamped v2. Published values of ``rho`` belong to it.

Everything is dense, linear in ``u`` and written for reading. Shapes: ``B`` pairs of the whole
batch, ``d`` embedding size, ``n`` samples of the data set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What one step yields; ``tau`` gradients are 0-D, for v2 ``[B]`` per modality."""

    value: Tensor
    image_gradient: Tensor  # [B, d]
    text_gradient: Tensor  # [B, d]
    tau_gradients: tuple[Tensor, ...]


class FastCLIPReference:
    """The estimator state of ``n`` samples and one step of any version, in float64.

    Args:
        version: "v0" to "v3".
        num_samples: n.
        tau: starting temperature (v2: of every sample).
        rho, eps: as in the objective.
        mode: "exact" or "fastclip_compat".
    """

    def __init__(
        self, version: str, num_samples: int, *, tau: float, rho: float, eps: float, mode: str
    ) -> None:
        self.version, self.rho, self.eps, self.mode = version, rho, eps, mode
        self.u = torch.zeros(2, num_samples, dtype=torch.float64)
        self.bound = torch.zeros(2, num_samples, dtype=torch.float64)
        self.visits = torch.zeros(num_samples, dtype=torch.int64)
        self.tau = torch.full((2, num_samples), tau, dtype=torch.float64)
        self.moments = torch.zeros(2, 2, num_samples, dtype=torch.float64)

    def step(
        self,
        image_features: Tensor,
        text_features: Tensor,
        index: Tensor,
        *,
        gamma: float,
        tau: float | None = None,
    ) -> Step:
        """Update ``u`` of the batch and return value and gradients.

        Args:
            image_features, text_features: ``[B, d]`` unit rows, float64.
            index: ``[B]`` distinct ids.
            gamma: weight of the new estimate.
            tau: the global temperature; None for v2, which keeps one per sample and modality.
        """
        size = len(index)
        similarity = image_features @ text_features.T
        taus = (
            self.tau[:, index] if tau is None else torch.full((2, size), tau, dtype=torch.float64)
        )
        # h[0]: image i is the anchor; h[1]: text i is the anchor.
        h = torch.stack([similarity, similarity.T]) - similarity.diagonal()[None, :, None]
        off_diagonal = ~torch.eye(size, dtype=torch.bool)
        scaled = h / taus[:, :, None]
        g = (scaled.exp() * off_diagonal).sum(2) / (size - 1)
        u = self._update(index, g, gamma)
        eps = self._eps(index, scaled)
        p = scaled.exp() * off_diagonal / (size - 1) / (eps + u)[:, :, None]
        return Step(
            value=self._value(p, u, eps, taus),
            image_gradient=self._weights(p, taus) @ text_features,
            text_gradient=self._weights(p, taus).T @ image_features,
            tau_gradients=self._tau_gradients(p, u, eps, scaled, taus),
        )

    def _update(self, index: Tensor, g: Tensor, gamma: float) -> Tensor:
        seen = self.visits[index] > 0
        u = torch.where(seen, (1 - gamma) * self.u[:, index] + gamma * g, g)
        self.u[:, index] = u
        self.visits[index] += 1
        return u

    def _eps(self, index: Tensor, scaled: Tensor) -> Tensor:
        """The released v2 keeps u shifted by a running maximum, which scales eps with it."""
        eps = torch.full(scaled.shape[:2], self.eps, dtype=torch.float64)
        if self.version == "v2" and self.mode == "fastclip_compat":
            bound = torch.maximum(self.bound[:, index], scaled.amax(2))
            self.bound[:, index] = bound
            eps = eps * bound.exp()
        return eps

    def _coefficients(self, taus: Tensor) -> Tensor:
        """``a = c / tau``: 1 where the objective carries the factor tau."""
        with_factor = self.version in ("v1", "v3") or (
            self.version == "v2" and self.mode == "exact"
        )
        if self.version == "v1" and self.mode == "fastclip_compat":
            with_factor = False
        return torch.ones_like(taus) if with_factor else 1 / taus

    def _weights(self, p: Tensor, taus: Tensor) -> Tensor:
        """``M / B``: the gradient with respect to the similarities."""
        a = self._coefficients(taus)[:, :, None] * p
        weights = a[0] + a[1].T
        weights -= torch.diag(a.sum(2).sum(0))
        half = 0.5 if self.mode == "fastclip_compat" else 1.0
        return half * weights / p.shape[1]

    def _value(self, p: Tensor, u: Tensor, eps: Tensor, taus: Tensor) -> Tensor:
        logs = (eps + u).log()
        if self.mode == "fastclip_compat":
            sums = p.sum(2).mean(1).sum()
            if self.version != "v3":
                return sums
            tau = taus[0, 0]
            return tau * (sums + self.rho + 0.5 * u.log().mean(1).sum())
        if self.version == "v0":
            return logs.mean(1).sum()
        rho = 0.0 if self.version == "v1" else self.rho
        return (taus * (logs + rho)).mean(1).sum()

    def _tau_gradients(
        self, p: Tensor, u: Tensor, eps: Tensor, scaled: Tensor, taus: Tensor
    ) -> tuple[Tensor, ...]:
        moved = (p * scaled).sum(2)  # [2, B]
        if self.version == "v2":
            gradients = (eps + u).log() + self.rho - moved
            if self.mode == "fastclip_compat":
                gradients = gradients.clamp(-5, 5)
            return gradients[0], gradients[1]
        energy, tau = moved.mean(1).sum(), taus[0, 0]
        if self.version == "v0":
            return (-energy / tau,)
        if self.mode == "fastclip_compat" and self.version == "v3":
            return (0.5 * u.log().mean(1).sum() + self.rho - energy,)
        rho = self.rho if self.version == "v3" else 0.0
        return ((eps + u).log().mean(1).sum() + 2 * rho - energy,)

    def adam(
        self, index: Tensor, gradients: tuple[Tensor, ...], settings: TauAdam, *, epoch: int
    ) -> None:
        """v2: move the temperatures of the batch. Call after :meth:`step`.

        ``exact`` counts the sample's own visits; the released code counts epochs, with both
        betas 0 in epoch 0.
        """
        gradient = torch.stack(gradients)
        beta1, beta2 = settings.beta1, settings.beta2
        if self.mode == "fastclip_compat":
            count = torch.full_like(gradient, epoch + 1)
            if epoch == 0:
                beta1 = beta2 = 0.0
        else:
            count = self.visits[index].double().expand_as(gradient)
        first = beta1 * self.moments[0][:, index] + (1 - beta1) * gradient
        second = beta2 * self.moments[1][:, index] + (1 - beta2) * gradient**2
        self.moments[0][:, index], self.moments[1][:, index] = first, second
        step = (first / (1 - beta1**count)) / ((second / (1 - beta2**count)).sqrt() + settings.eps)
        moved = self.tau[:, index] - settings.lr * step
        self.tau[:, index] = moved.clamp(settings.tau_min, settings.tau_max)


@dataclass(frozen=True)
class TauAdam:
    """Adam over the per-sample temperatures of v2."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    tau_min: float = 0.01
    tau_max: float = 1.0


def gamma_of(epoch: float, *, schedule: str, gamma_min: float, decay_epochs: float) -> float:
    """Weight of the new estimate after ``epoch`` (fractional) epochs, from 1 to ``gamma_min``."""
    if schedule == "constant" or epoch >= decay_epochs:
        return gamma_min
    return gamma_min + (1 - gamma_min) * 0.5 * (1 + math.cos(math.pi * epoch / decay_epochs))
