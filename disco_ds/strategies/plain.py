"""What all strategies with a plain torch optimizer share; they differ in how they wrap."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.blocks import compile_blocks_, transformer_blocks
from disco_ds.comm_hooks import CommHook
from disco_ds.distributed import World
from disco_ds.models import Encoders
from disco_ds.optim import (
    OptimConfig,
    build_optimizer,
    parameter_groups,
    set_learning_rate,
    set_step_count,
    step_tensor,
)
from disco_ds.strategies.base import (
    EngineState,
    StepResult,
    Strategy,
    copy_into,
    local_rank_of_device,
    persistent_buffers,
)
from disco_ds.strategies.config import EngineConfig, Precision
from disco_ds.strategies.loss_scale import LossScale

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PlainStrategy(Strategy):
    """fp32 weights, a torch optimizer, and torch's autocast for bf16 and fp16.

    Args:
        world: this process.
        precision: arithmetic of the encoders; fp16 adds a dynamic loss scale.
        engine: options.
    """

    def __init__(
        self, world: World, *, precision: Precision, engine: EngineConfig | None = None
    ) -> None:
        super().__init__(world, engine)
        self.precision = precision

    def setup(self, encoders: Encoders, optim: OptimConfig) -> None:
        """Wrap the encoders, then make the optimizer of what the wrapper made of them."""
        self.module = encoders.to(self.world.device)
        if self.config.compile:
            compile_blocks_(transformer_blocks(encoders))
        with local_rank_of_device(self.world):
            self.model = self._wrap(self.module)
        self.optimizer = build_optimizer(optim, parameter_groups(self.module, optim))
        self.max_grad_norm = optim.max_grad_norm
        self.optimizer_steps = 0
        self.loss_scale = LossScale() if self.precision == "fp16" else None

    @property
    def hookable(self) -> Any:
        """The wrapped module."""
        return self.model

    def attach_hook(self, hook: CommHook, loss: nn.Module) -> None:
        """As for any strategy; the loss scale of fp16 is ours, the hook must know of it."""
        hook.check(fp16=self.precision == "fp16")
        super().attach_hook(hook, loss)

    @abstractmethod
    def _wrap(self, encoders: Encoders) -> nn.Module:
        """The module to call. Collective."""

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Features ``[b, d]``, not normalised, through the wrapped forward."""
        with self._autocast():
            features: tuple[Tensor | None, Tensor | None] = self.model(image, text)
            return features

    def computing(self) -> AbstractContextManager[object]:
        """torch's autocast."""
        return self._autocast()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=LOW_PRECISION[self.precision])

    def backward(self, surrogate: Tensor) -> None:
        """Accumulate into ``.grad``, times the loss scale."""
        scale = self.loss_scale.value if self.loss_scale else 1.0
        (surrogate * scale).backward()

    def step(self, lr: float) -> StepResult:
        """Clip by the global norm, update, clear; skip when the norm is not finite."""
        gradients = [p.grad for p in self._trainable().values() if p.grad is not None]
        scale = self.loss_scale.value if self.loss_scale else 1.0
        norm = self._global_norm(gradients) / scale
        skipped = not math.isfinite(norm)
        if not skipped:
            self._scale_gradients(gradients, norm, scale)
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            self.optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=skipped)
        return StepResult(grad_norm=norm, skipped=skipped)

    def _scale_gradients(self, gradients: Iterable[Tensor], norm: float, scale: float) -> None:
        factor = 1.0 / scale
        if self.max_grad_norm is not None:
            factor *= min(1.0, self.max_grad_norm / (norm + 1e-6))
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)

    def _global_norm(self, gradients: list[Tensor]) -> float:
        """Euclidean norm of all gradients of the model; collective where they are sharded."""
        return float(torch.nn.utils.get_total_norm(gradients))

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _weights(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **persistent_buffers(self.module)}

    def state(self) -> EngineState:
        """Copies of parameters, buffers and moments, on the CPU; kept on the main rank."""
        moments = {
            f"{key}/{name}": value
            for name, parameter in self._trainable().items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if key != "step"
        }
        return EngineState(
            self._collect(self._weights()),
            self._collect(moments),
            self.optimizer_steps,
            self.loss_scale.state() if self.loss_scale else None,
        )

    def _collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Possibly sharded tensors, whole, on the main rank's CPU. Collective."""
        if not self.world.is_main:
            return {}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _copy(self, target: Tensor, value: Tensor) -> None:
        """Write a whole tensor into a possibly sharded one."""
        target.copy_(value)

    def load_state(self, state: EngineState) -> None:
        """Take over parameters, buffers and moments."""
        copy_into(self._weights(), state.parameters, self._copy)
        keys = sorted({name.split("/", 1)[0] for name in state.moments})
        for name, parameter in self._trainable().items():
            own = {key: torch.zeros_like(parameter) for key in keys}
            copy_into({f"{k}/{name}": value for k, value in own.items()}, state.moments, self._copy)
            if keys:
                step = step_tensor(self.optimizer, parameter, state.optimizer_steps)
                self.optimizer.state[parameter] = {"step": step, **own}
        set_step_count(self.optimizer, state.optimizer_steps)
        self.optimizer_steps = state.optimizer_steps
        if self.loss_scale is not None and state.loss_scale is not None:
            self.loss_scale.load_state(state.loss_scale)
