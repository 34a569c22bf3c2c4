"""One process, no engine: the plain PyTorch loop that every other strategy must equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.models import Encoders
from disco_ds.optim import OptimConfig, build_optimizer, parameter_groups, set_learning_rate
from disco_ds.strategies.base import (
    EngineState,
    Precision,
    StepResult,
    Strategy,
    copy_into,
    persistent_buffers,
)


class SingleStrategy(Strategy):
    """Encoders and optimizer on one device; bf16 is torch's autocast over fp32 weights."""

    name = "single"

    def __init__(self, world: World, *, precision: Precision) -> None:
        if world.world_size != 1:
            raise ValueError(f"strategy single runs on one process, not {world.world_size}")
        super().__init__(world)
        self.precision = precision

    def setup(self, encoders: Encoders, optim: OptimConfig) -> None:
        """Move the encoders to the device and make their optimizer."""
        self.module = encoders.to(self.world.device)
        self.optimizer = build_optimizer(optim, parameter_groups(self.module, optim))
        self.max_grad_norm = optim.max_grad_norm
        self.optimizer_steps = 0

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Features ``[b, d]``, not normalised."""
        with self._autocast():
            features: tuple[Tensor | None, Tensor | None] = self.module(image, text)
            return features

    def _autocast(self) -> AbstractContextManager[object]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Nothing to reduce."""
        yield

    def backward(self, surrogate: Tensor, *, is_last: bool) -> None:
        """Accumulate into ``.grad``."""
        surrogate.backward()

    def step(self, lr: float) -> StepResult:
        """Clip, update, clear."""
        set_learning_rate(self.optimizer, lr)
        limit = self.max_grad_norm if self.max_grad_norm is not None else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._trainable().values(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return StepResult(grad_norm=float(norm), skipped=False)

    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def state(self) -> EngineState:
        """Copies of parameters, buffers and moments, on the CPU."""
        moments = {}
        for name, parameter in self._trainable().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key != "step":
                    moments[f"{key}/{name}"] = value.detach().cpu().clone()
        parameters = {name: t.detach().cpu().clone() for name, t in self._weights().items()}
        return EngineState(parameters, moments, self.optimizer_steps)

    def _weights(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **persistent_buffers(self.module)}

    def load_state(self, state: EngineState) -> None:
        """Take over parameters, buffers and moments."""
        copy_into(self._weights(), state.parameters)
        keys = {name.split("/", 1)[0] for name in state.moments}
        for name, parameter in self._trainable().items():
            if keys:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(state.optimizer_steps)),
                    **{key: torch.zeros_like(parameter) for key in sorted(keys)},
                }
            own = {key: self.optimizer.state[parameter][key] for key in keys}
            copy_into({f"{key}/{name}": target for key, target in own.items()}, state.moments)
        self.optimizer_steps = state.optimizer_steps
