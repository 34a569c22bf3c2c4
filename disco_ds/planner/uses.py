"""Which modules use which parameters, and what ZeRO stage 3 makes of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Uses:
    """Which parameters (positions among all) modules use, in the order of their calls."""

    forward: tuple[tuple[int, ...], ...]
    """Modules as their forward begins."""
    backward: tuple[tuple[int, ...], ...]
    """Modules as their backward begins: the outer ones before what they contain."""
    borrowed: frozenset[int]
    """Parameters that a module uses which does not own them."""


class UseRecorder:
    """Records which module uses which parameter during a forward, its own or another's."""

    def __init__(self, encoders: nn.Module) -> None:
        self._encoders = encoders
        self._position = {id(p): i for i, p in enumerate(encoders.parameters())}
        self._stack: list[nn.Module] = []
        self._begun: list[nn.Module] = []
        self._ended: list[nn.Module] = []
        self._own: dict[nn.Module, dict[int, None]] = {}
        self._borrowed: dict[nn.Module, dict[int, None]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> UseRecorder:
        for module in self._encoders.modules():
            own = (p for p in module._parameters.values() if p is not None)
            self._own[module] = dict.fromkeys(self._position[id(p)] for p in own)
            module._parameters = _Watched(module._parameters, self, module)
            self._handles += [
                module.register_forward_pre_hook(self._begin),
                module.register_forward_hook(self._end),
            ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._own:
            module._parameters = dict(module._parameters)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append(module)
        self._begun.append(module)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._ended.append(self._stack.pop())

    def used(self, owner: nn.Module, parameter: Any) -> None:
        """Called at every access by name."""
        if parameter is not None and self._stack and self._stack[-1] is not owner:
            user = self._borrowed.setdefault(self._stack[-1], {})
            user[self._position[id(parameter)]] = None

    def result(self) -> Uses:
        """What was seen."""

        def of(modules: Iterable[nn.Module]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(self._own[m] | self._borrowed.get(m, {})) for m in modules)

        borrowed = frozenset(i for used in self._borrowed.values() for i in used)
        return Uses(of(self._begun), of(reversed(self._ended)), borrowed)


class _Watched(dict[str, Any]):
    """A module's parameters, telling who looks one up."""

    def __init__(self, parameters: dict[str, Any], recorder: UseRecorder, owner: nn.Module) -> None:
        super().__init__(parameters)
        self._recorder, self._owner = recorder, owner

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self._recorder.used(self._owner, value)
        return value


class _Passed(torch.autograd.Function):
    """What ZeRO stage 3 does with inputs and outputs of a module, for the order of its gathers."""

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def hook_modules(encoders: nn.Module) -> None:
    """Send inputs and outputs of every module through a function, as ZeRO stage 3 does."""
    for module in encoders.modules():
        module.register_forward_hook(lambda _, inputs, output: _pass(output))
        module.register_forward_pre_hook(lambda _, inputs: _pass(inputs))


def _pass(value: Any) -> Any:
    return tree_map_only(Tensor, _Passed.apply, value)
