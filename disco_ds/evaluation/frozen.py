"""A model that is only evaluated: a whole copy on every rank, no engine around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.models import Encoders

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FrozenModel:
    """The :class:`disco_ds.evaluation.encode.Encoder` of weights that do not change.

    Args:
        encoders: with its weights.
        world: this process.
        precision: fp32, or bf16 or fp16 by autocast, as training evaluates.
    """

    def __init__(self, encoders: Encoders, world: World, *, precision: str = "fp32") -> None:
        self.encoders = encoders.to(world.device).eval()
        self.world = world
        self.precision = precision

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Features ``[b, d]``, not normalised. No collective."""
        autocast = (
            torch.autocast(self.world.device.type, dtype=AUTOCAST[self.precision])
            if self.precision in AUTOCAST
            else nullcontext()
        )
        with autocast:
            features: tuple[Tensor | None, Tensor | None] = self.encoders(image, text)
            return features

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients; dropout is off anyway."""
        with torch.no_grad():
            yield

    def average_buffers(self) -> None:
        """Every rank has loaded the same."""
