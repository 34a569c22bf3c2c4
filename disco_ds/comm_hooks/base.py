"""What a communication hook is, and the call it gets to see.

Two kinds of traffic carry gradients in a contrastive step. On the *feature plane* the loss
exchanges features and what is needed for their gradients; a hook chooses the way when it is bound
to the loss. On the *parameter plane* the engine reduces parameter gradients; a hook sees every such
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn

Kind = Literal["all_reduce", "reduce", "reduce_scatter"]
Undo = Callable[[], None]


@dataclass(frozen=True)
class Reduction:
    """One collective over parameter gradients, about to happen.

    What travels is already multiplied by a loss scale and by the engine's averaging factor where
    the engine has one before the collective. The padding of a reduce-scatter's input is
    uninitialised memory under DeepSpeed: never take its norm or maximum.
    """

    kind: Kind
    input: Tensor
    """What this rank contributes, 1-D."""

    key: object
    """Which of the step's reductions this is, the same in every step."""

    transport: Callable[[Tensor], None]

    layout: str = ""
    """Which gradients fill the input, in which order: DDP regroups them after its first step."""

    def send(self, stand_in: Tensor | None = None) -> None:
        """Do the collective on the input, or on a tensor of its shape and any float dtype.

        The result goes where the engine expects it, in the engine's dtype. Exactly one call per
        reduction; collective.
        """
        self.transport(self.input if stand_in is None else stand_in)


class CommHook:
    """A way for gradients to travel. Override what differs; this one changes nothing.

    A hook issues the same collectives on every rank and works on the current stream.
    """

    def check(self, *, fp16: bool) -> None:
        """Refuse an engine this hook does not work with; ``fp16``: gradients are loss-scaled.

        Raises:
            ValueError: naming the hook and the remedy.
        """

    def bind(self, loss: nn.Module, process_group: dist.ProcessGroup | None) -> Undo:
        """Take charge of a loss's communication; the result gives it back.

        Raises:
            ValueError: the loss cannot communicate this way.
        """
        return _nothing

    def reduce(self, reduction: Reduction) -> None:
        """Carry out one reduction of parameter gradients."""
        reduction.send()

    def metrics(self) -> dict[str, float]:
        """Numbers to log, each a mean over the steps since the last call."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What is carried from step to step on this rank, for a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over the :meth:`state` of the same rank of as many ranks."""


def _nothing() -> None:
    return


class _Chain(CommHook):
    def __init__(self, hooks: tuple[CommHook, ...]) -> None:
        self.hooks = hooks

    def check(self, *, fp16: bool) -> None:
        for hook in self.hooks:
            hook.check(fp16=fp16)

    def bind(self, loss: nn.Module, process_group: dist.ProcessGroup | None) -> Undo:
        with ExitStack() as undo:  # undone at once when a later hook refuses
            for hook in self.hooks:
                undo.callback(hook.bind(loss, process_group))
            return undo.pop_all().close

    def reduce(self, reduction: Reduction) -> None:
        first, *rest = self.hooks
        if rest:
            following = _Chain(tuple(rest))

            def on(tensor: Tensor, reduction: Reduction = reduction) -> None:
                following.reduce(replace(reduction, input=tensor))

            first.reduce(replace(reduction, transport=on))
        else:
            first.reduce(reduction)

    def metrics(self) -> dict[str, float]:
        return {key: value for hook in self.hooks for key, value in hook.metrics().items()}

    def state(self) -> dict[str, Tensor]:
        return {
            f"{number}.{key}": value
            for number, hook in enumerate(self.hooks)
            for key, value in hook.state().items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for number, hook in enumerate(self.hooks):
            prefix = f"{number}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            hook.load_state(own)


def compose(*hooks: CommHook) -> CommHook:
    """One hook of several; what the first one sends is what the second one sees."""
    return hooks[0] if len(hooks) == 1 else _Chain(hooks)
