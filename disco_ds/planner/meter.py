"""Counts live tensor bytes and collectives, operator by operator, on real or on fake tensors.

What is counted is storage that Python-visible operators hand out: not the allocator's rounding,
nor workspaces inside a kernel.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# Operator -> name, and the argument that has the size of the whole result.
COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 0),
    "alltoall_": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "recv_": ("send_recv", 0),
}
HOST = "host"
"""Category of tensors that are in host memory: counted, but in no sum."""
SILENT = frozenset({"barrier", "monitored_barrier_", "send"})


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in one phase; bytes of whole results, as ``CountingHook`` has them."""

    phase: str
    collective: str
    calls: int
    bytes: int


@dataclass
class Peak:
    """The highest sum of live bytes, and what it was made of."""

    bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class MemoryMeter(TorchDispatchMode):
    """Use as a context manager; :meth:`phase` names what follows.

    Tensors that existed before count from :meth:`mark` on. A new tensor belongs to the current
    phase's ``category`` until it is marked otherwise.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, Peak] = {}
        self.collectives: Counter[tuple[str, str, str]] = Counter()
        self.curve: list[tuple[int, int]] | None = None
        """When a list: live bytes without gradients, and gradients, after every new tensor."""
        self._known: dict[int, _Known] = {}
        self._phase, self._category = "setup", "other"
        self._fake_mode: Any = None

    # What a user calls.

    @contextmanager
    def phase(self, name: str, category: str) -> Iterator[None]:
        """Charge what happens inside to a phase, and new tensors to a category."""
        before = self._phase, self._category
        self._phase, self._category = name, category
        self._look()
        try:
            yield
        finally:
            self._phase, self._category = before

    def mark(self, tensors: Iterable[Any], category: str) -> None:
        """Count the storage of these tensors under ``category`` from now on."""
        for tensor in tensors:
            for storage in _storages(tensor):
                known = self._known.get(storage._cdata)
                if known is None:
                    self._add(storage, category)
                elif known.category != category:
                    self.live[known.category] -= known.bytes
                    self.live[category] += known.bytes
                    known.category = category
        self._look()

    def restart(self) -> None:
        """Forget peaks and collectives; what is live stays."""
        self.peaks.clear()
        self.collectives.clear()

    @property
    def total(self) -> int:
        """Live bytes now."""
        return sum(self.live.values()) - self.live[HOST]

    def peak(self) -> Peak:
        """The highest of all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.bytes, default=Peak())

    def traffic(self) -> list[Traffic]:
        """Collectives by phase and kind."""
        keys = sorted({(phase, kind) for phase, kind, _ in self.collectives})
        return [
            Traffic(
                phase,
                kind,
                calls=self.collectives[phase, kind, "calls"],
                bytes=self.collectives[phase, kind, "bytes"],
            )
            for phase, kind in keys
        ]

    # The dispatch mode.

    def __enter__(self) -> MemoryMeter:
        from torch._guards import detect_fake_mode  # noqa: F401

        self._fake_mode = _active_fake_mode()
        resize = torch.UntypedStorage.resize_
        meter = self

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            meter._resized(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its local operators come by themselves
        if func.namespace == "c10d":
            self._count(func, args)
        result = func(*args, **(kwargs or {}))
        if _active_fake_mode() is self._fake_mode:  # not inside shape propagation
            self._see(result)
        return result

    def _see(self, result: Any) -> None:
        """Count storages that an operator handed out for the first time."""
        storages = [s for tensor in _tensors(result) for s in _storages(tensor)]
        new = [storage for storage in storages if storage._cdata not in self._known]
        for storage in new:
            if storage._cdata not in self._known:
                self._add(storage, self._category)
        if new:
            self._look()

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name.partition("::")[2]
        if name in SILENT:
            return
        kind, position = COLLECTIVES[name]
        tensors = [leaf for leaf in tree_leaves(args[position]) if isinstance(leaf, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.collectives[self._phase, kind, "bytes"] += size
        self.collectives[self._phase, kind, "calls"] += 1

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        key = storage._cdata
        known = self._known[key] = _Known(category, storage.nbytes())

        def gone(_: Any) -> None:
            self.live[known.category] -= known.bytes
            if self._known.get(key) is known:
                del self._known[key]

        known.reference = weakref.ref(storage, gone)
        self.live[category] += known.bytes

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage._cdata)
        if known is not None:
            self.live[known.category] += storage.nbytes() - known.bytes
            known.bytes = storage.nbytes()
            self._look()

    def _look(self) -> None:
        """Keep the highest sum of this phase."""
        total = self.total
        if self.curve is not None:
            self.curve.append((total - self.live["gradients"], self.live["gradients"]))
        peak = self.peaks.setdefault(self._phase, Peak())
        if total > peak.bytes:
            peak.bytes = total
            peak.parts = {k: v for k, v in self.live.items() if v and k != HOST}


@dataclass
class _Known:
    category: str
    bytes: int
    reference: Any = None


def _tensors(result: Any) -> Iterator[Tensor]:
    """Tensors with memory among an operator's results (at most lists of tensors)."""
    for leaf in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(leaf, (list, tuple)):
            yield from _tensors(leaf)
        elif isinstance(leaf, Tensor) and leaf.device.type != "meta":
            yield leaf


def _storages(tensor: Any) -> list[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name) for name in names)
        return [s for part in inner if isinstance(part, Tensor) for s in _storages(part)]
    return [tensor.untyped_storage()]


def _active_fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, FakeTensorMode):
            return mode
    return None
