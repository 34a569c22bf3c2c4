"""Before anything is trained: the losses give the values and gradients of their references."""

from __future__ import annotations

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from disco_ds.losses import DiscoLoss, FastCLIPLoss
from disco_ds.losses.fastclip_reference import FastCLIPReference

SIZE, DIM, SAMPLES, STEPS = 12, 16, 20, 3
TAU, RHO, GAMMA = 0.1, 2.0, 0.5
CLOSE = 1e-9  # float64


def check() -> None:
    """Raise :class:`SystemExit` naming the loss that differs from its reference."""
    generator = torch.Generator().manual_seed(0)
    shape = (STEPS, 2, SIZE, DIM)
    batches = F.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
    index = [torch.randperm(SAMPLES, generator=generator)[:SIZE] for _ in range(STEPS)]
    _same("DiscoLoss", _gradients(DiscoLoss(), batches[0]), _clip_gradients(batches[0]))
    for version in ("v0", "v1", "v2", "v3"):
        loss = FastCLIPLoss(
            version,
            num_samples=SAMPLES,
            gamma_min=GAMMA,
            gamma_schedule="constant",
            rho=RHO,
            tau_init=TAU,
            tau_lr=0.0 if version == "v2" else None,
            table_dtype=torch.float64,
        )
        reference = FastCLIPReference(version, SAMPLES, tau=TAU, rho=RHO, eps=1e-14, mode="exact")
        for step in range(STEPS):
            found = _gradients(loss, batches[step], index[step])
            loss.after_step(False)
            images, texts = batches[step]
            tau = None if version == "v2" else TAU
            wanted = reference.step(images, texts, index[step], gamma=GAMMA, tau=tau)
            gradients = (wanted.value, wanted.image_gradient, wanted.text_gradient)
            _same(f"FastCLIP-{version}", found, gradients)


def _gradients(
    loss: torch.nn.Module, features: Tensor, index: Tensor | None = None
) -> tuple[Tensor, ...]:
    images, texts = (side.clone().requires_grad_() for side in features)
    value = loss(images, texts, 1 / TAU, index=index)
    return (value.detach(), *torch.autograd.grad(value, (images, texts)))


def _clip_gradients(features: Tensor) -> tuple[Tensor, ...]:
    images, texts = (side.clone().requires_grad_() for side in features)
    value = open_clip.loss.ClipLoss()(images, texts, torch.tensor(1 / TAU, dtype=torch.float64))
    return (value.detach(), *torch.autograd.grad(value, (images, texts)))


def _same(name: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for own, other in zip(found, wanted, strict=True):
        error = float((own - other).abs().max() / other.abs().max())
        if not error < CLOSE:
            raise SystemExit(f"{name} differs from its reference by {error:.1e}: nothing is run")
