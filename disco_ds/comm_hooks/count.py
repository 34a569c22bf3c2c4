"""Counts what travels: calls and bytes per step, plane and collective."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.comm_hooks.base import CommHook, Reduction, Undo


class CountingHook(CommHook):
    """Bytes of whole results: what an all-gather leaves, what a reduction takes, per rank.

    A ring moves ``(W - 1) / W`` of an all-gather's or reduce-scatter's bytes through every link
    and twice that of an all-reduce's. Counted are the losses this hook is bound to (features) and
    the engine's gradient reductions (parameters), not the engine's gathers of parameters.
    """

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()
        """Bytes by plane and collective since the last :meth:`metrics`."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """Calls likewise."""
        self._steps = 0

    def bind(self, loss: nn.Module, process_group: dist.ProcessGroup | None) -> Undo:
        """Watch the loss's forward, which communicates everything; one training call is a step."""
        modes: list[ExitStack] = []

        def before(module: nn.Module, args: Any) -> None:
            self._steps += module.training
            modes.append(ExitStack())
            modes[-1].enter_context(_Collectives(self))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            modes.pop().close()

        undo = ExitStack()
        undo.callback(loss.register_forward_pre_hook(before).remove)
        undo.callback(loss.register_forward_hook(after, always_call=True).remove)
        return undo.close

    def reduce(self, reduction: Reduction) -> None:
        """Count, then send."""
        self.add("parameters", reduction.kind, reduction.input)
        reduction.send()

    def add(self, plane: str, collective: str, tensor: Tensor) -> None:
        """Count one call that carries ``tensor``."""
        self.bytes[plane, collective] += tensor.numel() * tensor.element_size()
        self.calls[plane, collective] += 1

    def metrics(self) -> dict[str, float]:
        """``comm/PLANE/COLLECTIVE_bytes`` and ``..._calls`` per step since the last call.

        Steps are calls of the bound loss; without one, everything since the last call is a step.
        """
        steps = max(self._steps, 1)
        values = {}
        for name, counter in (("bytes", self.bytes), ("calls", self.calls)):
            for (plane, collective), total in sorted(counter.items()):
                values[f"comm/{plane}/{collective}_{name}"] = total / steps
            counter.clear()
        self._steps = 0
        return values


# Operator -> name, and the argument that has the size of the whole result.
_WHOLE = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allreduce_": ("all_reduce", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 0),
    "alltoall_": ("all_to_all", 0),
    "recv_": ("send_recv", 0),
}


class _Collectives(TorchDispatchMode):
    """Sees the collectives under a block as operators, whichever function they were called by."""

    def __init__(self, hook: CountingHook) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hook = hook

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            if name in _WHOLE:
                collective, position = _WHOLE[name]
                self._count(collective, args[position])
        return func(*args, **(kwargs or {}))

    def _count(self, collective: str, tensors: Any) -> None:
        """Count one call; its tensors may be nested in lists."""
        while isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            tensors = tensors[0]
        if isinstance(tensors, Tensor):
            self.hook.add("features", collective, tensors)
            return
        for tensor in tensors:
            self._count(collective, tensor)
