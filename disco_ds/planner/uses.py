"""Which modules use which parameters, in the order of a pass, as ZeRO stage 3 gets to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Kind = Literal["begin", "end", "back", "done"]
Event = tuple[Kind, int]
ROOT = 0


@dataclass(frozen=True)
class Uses:
    """Modules by number, the whole model first, and what becomes of them in a pass.

    A module's forward begins and ends; its backward comes back to it, and is done where its inputs
    have gradients. Recomputed forwards are part of the backward.
    """

    parameters: tuple[tuple[int, ...], ...] = ()
    """Positions (among all parameters) that a module uses, its own and those of others."""
    forward: tuple[Event, ...] = ()
    """A forward without graph."""
    training: tuple[Event, ...] = ()
    """A forward with graph, and its backward."""


class UseRecorder:
    """Hooks modules as ZeRO stage 3 does: inputs and outputs go through functions of its own."""

    def __init__(self, encoders: nn.Module) -> None:
        self._position = {id(p): i for i, p in enumerate(encoders.parameters())}
        self._number = {module: number for number, module in enumerate(encoders.modules())}
        self._stack: list[nn.Module] = []
        self._waiting: dict[nn.Module, int] = {}
        self._used: dict[nn.Module, dict[int, None]] = {}
        self._events: list[Event] = []
        for module in self._number:
            own = (p for p in module._parameters.values() if p is not None)
            self._used[module] = dict.fromkeys(self._position[id(p)] for p in own)
            module._parameters = _Watched(module._parameters, self)
            module.register_forward_hook(self._end)
            module.register_forward_pre_hook(self._begin)

    def used(self, parameter: Any) -> None:
        """Called at every access by name."""
        if parameter is not None and self._stack:
            self._used[self._stack[-1]][self._position[id(parameter)]] = None

    def take(self) -> tuple[Event, ...]:
        """Events since the last time."""
        events, self._events = tuple(self._events), []
        return events

    def parameters(self) -> tuple[tuple[int, ...], ...]:
        """What modules used so far."""
        return tuple(tuple(sorted(used)) for used in self._used.values())

    def _note(self, kind: Kind, module: nn.Module) -> None:
        self._events.append((kind, self._number[module]))

    def _begin(self, module: nn.Module, inputs: Any) -> Any:
        self._note("begin", module)
        self._stack.append(module)
        self._waiting[module] = 0

        def count(tensor: Tensor) -> Tensor:
            self._waiting[module] += tensor.requires_grad
            return _passed(tensor, arrived)

        def arrived() -> None:
            self._waiting[module] -= 1
            if self._waiting[module] == 0:
                self._note("done", module)

        return tree_map_only(Tensor, count, inputs)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self._note("end", module)
        self._stack.pop()

        def arrived() -> None:
            self._note("back", module)

        return tree_map_only(Tensor, lambda tensor: _passed(tensor, arrived), output)


class _Watched(dict[str, Any]):
    """A module's parameters, telling when one is looked up."""

    def __init__(self, parameters: dict[str, Any], recorder: UseRecorder) -> None:
        super().__init__(parameters)
        self._recorder = recorder

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self._recorder.used(value)
        return value


class _Passed(torch.autograd.Function):
    """Hands a tensor on, and tells when its gradient arrives."""

    @staticmethod
    def forward(tensor: Tensor, arrived: Callable[[], None]) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.arrived = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.arrived()
        return *gradients, None


def _passed(tensor: Tensor, arrived: Callable[[], None]) -> Tensor:
    passed: Tensor = _Passed.apply(tensor, arrived)
    return passed


def as_one_call(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Join the calls of both towers, one after the other, to the one call that a step makes."""
    end = events.index(("end", ROOT))
    assert events[end + 1] == ("begin", ROOT)
    return events[:end] + events[end + 2 :]
