"""The two-pass step in somebody else's loop: around a model that they wrapped themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from disco_ds.distributed import World


def _device_of(model: Any) -> torch.device:
    """Where the model computes; with offloading its parameters lie elsewhere."""
    if hasattr(model, "coalesce_grad_reduction"):
        return torch.device(model.device)
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    device: torch.device = parameter.device
    return device


class AdoptedModel:
    """What :func:`disco_ds.grad_cache.contrastive_backward` needs of a wrapped model.

    The model's forward is that of :class:`disco_ds.models.Encoders`. Optimizer, clipping, schedule
    and checkpoints stay with the caller, who steps after ``contrastive_backward`` as after any
    backward (a DeepSpeed engine: ``engine.step()``).

    Args:
        model: in DistributedDataParallel, fully_shard, or a DeepSpeed engine (also those that
            accelerate prepared), or not wrapped at all.
        backward: how a scalar is differentiated, ``scaler.scale(loss).backward()`` for instance;
            ``loss.backward()`` when not given (``engine.backward`` for DeepSpeed).
    """

    def __init__(self, model: Any, *, backward: Callable[[Tensor], object] | None = None) -> None:
        self.model = model
        self.module: nn.Module = model
        self._is_engine = hasattr(model, "coalesce_grad_reduction")
        self._backward = backward
        device = _device_of(model)
        is_distributed = dist.is_available() and dist.is_initialized()
        self.world = (
            World(dist.get_rank(), dist.get_world_size(), device=device)
            if is_distributed
            else World(device=device)
        )

    @property
    def _coalesces(self) -> bool:
        return self._is_engine and hasattr(self.model.optimizer, "_coalesce_grad_reduction")

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Features through the model's own forward."""
        features: tuple[Tensor | None, Tensor | None] = self.model(image, text)
        return features

    def accumulate(self) -> AbstractContextManager[None]:
        """One reduction a step."""
        if not self._coalesces:
            return nullcontext()
        coalesced: AbstractContextManager[None] = self.model.coalesce_grad_reduction()
        return coalesced

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Hold gradients back until the last micro-batch, by whatever the wrapper offers."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        elif self._is_engine and not self._coalesces:
            self.model.set_gradient_accumulation_boundary(is_last)
        hold = isinstance(self.model, DistributedDataParallel) and not is_last
        with self.model.no_sync() if hold else nullcontext():
            yield

    def backward(self, surrogate: Tensor) -> None:
        """Differentiate, as the caller does it."""
        if self._backward is not None:
            self._backward(surrogate)
        elif self._is_engine:
            self.model.backward(surrogate, scale_wrt_gas=False)
        else:
            torch.autograd.backward(surrogate)
