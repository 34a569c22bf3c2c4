"""DDP and FSDP2: their own extension points, made to look like any other reduction.

Neither can take a hook back; a removed one leaves a callback that does what torch would do.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from disco_ds.comm_hooks.base import CommHook, Reduction, Undo

_SLOT = "_disco_comm_hook"


class _Slot:
    """Where a wrapped model finds its present hook."""

    def __init__(self) -> None:
        self.hook: CommHook | None = None

    def fill(self, hook: CommHook) -> Undo:
        if self.hook is not None:
            raise ValueError(
                "this model has a communication hook: remove it first, or register "
                "compose(first, second)"
            )
        self.hook = hook
        return self._empty

    def _empty(self) -> None:
        self.hook = None


def register_ddp(model: DistributedDataParallel, hook: CommHook) -> Undo:
    """Hook every bucket of ``model``: an all-reduce (SUM) of gradients already divided by W."""
    slot: _Slot | None = getattr(model, _SLOT, None)
    if slot is None:
        slot = _Slot()
        model.register_comm_hook(_BucketReducer(slot, model), _reduce_bucket)
        setattr(model, _SLOT, slot)
    return slot.fill(hook)


class _BucketReducer:
    def __init__(self, slot: _Slot, model: DistributedDataParallel) -> None:
        self.slot, self.group = slot, model.process_group
        self._places = {id(p): place for place, p in enumerate(model.parameters())}
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def stream(self, device: torch.device) -> Iterator[None]:
        """A stream of our own on CUDA, so that the backward goes on meanwhile."""
        if device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sum a ``GradBucket`` over ranks through the present hook; the future holds its buffer."""
        buffer = bucket.buffer()
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        with self.stream(buffer.device):
            # As DDP without a hook: divide, then sum.
            buffer.mul_(1.0 / self.group.size())
            (self.slot.hook or CommHook()).reduce(
                Reduction(
                    "all_reduce",
                    buffer,
                    bucket.index(),
                    self._transport(buffer),
                    self._layout(bucket),
                )
            )
            future.set_result(buffer)
        return future

    def _layout(self, bucket: Any) -> str:
        """Short for the parameters of a bucket; the same in another process."""
        places = [self._places[id(parameter)] for parameter in bucket.parameters()]
        return f"{zlib.crc32(repr(places).encode()):08x}"

    def _transport(self, buffer: Tensor) -> Callable[[Tensor], None]:
        def transport(tensor: Tensor) -> None:
            dist.all_reduce(tensor, group=self.group)
            if tensor is not buffer:
                buffer.copy_(tensor)

        return transport


def _reduce_bucket(state: _BucketReducer, bucket: Any) -> torch.futures.Future[Tensor]:
    return state.reduce(bucket)


# DDP compares annotations as objects, not as the strings of postponed evaluation.
_reduce_bucket.__annotations__ = {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[Tensor],
}


def register_fsdp2(model: FSDPModule, hook: CommHook) -> Undo:
    """Hook the reduce-scatter of every unit of ``model``; torch asks for its mean.

    Raises:
        ValueError: an old torch, or a mesh whose second dimension torch reduces past any hook.
    """
    if not hasattr(model, "set_custom_reduce_scatter"):
        raise ValueError(f"torch {torch.__version__} has no hook for FSDP2: install torch>=2.9")
    if (mesh := fsdp2_mesh(model)).ndim > 1:
        raise ValueError(
            f"fully_shard over a mesh of {mesh.ndim} dimensions {tuple(mesh.shape)}: torch hands "
            "only the reduce-scatter of one of them to a hook; use a mesh of one dimension"
        )
    slot: _Slot | None = getattr(model, _SLOT, None)
    if slot is None:
        slot = _Slot()
        units = [m for m in cast(torch.nn.Module, model).modules() if isinstance(m, FSDPModule)]
        for number, unit in enumerate(units):
            unit.set_custom_reduce_scatter(_ReduceScatter(slot, number))  # type: ignore[arg-type]
        setattr(model, _SLOT, slot)
    return slot.fill(hook)


def fsdp2_mesh(model: FSDPModule) -> DeviceMesh:
    """The ranks that share ``model``: the mesh of its parameters.

    Raises:
        ValueError: it has no sharded parameter.
    """
    for parameter in cast(torch.nn.Module, model).parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    raise ValueError("no parameter of this model is sharded: call fully_shard before the hook")


class _ReduceScatter:
    """torch's ``ReduceScatter`` interface (by shape: its base class is private)."""

    def __init__(self, slot: _Slot, unit: int) -> None:
        self.slot, self.unit = slot, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce, through the hook; torch calls it on its reduce-scatter stream."""

        def transport(tensor: Tensor) -> None:
            if tensor.dtype == output_tensor.dtype:
                reduce_scatter(output_tensor, tensor, op=op, group=group)
                return
            output = torch.empty_like(output_tensor, dtype=tensor.dtype)
            reduce_scatter(output, tensor, op=op, group=group)
            output_tensor.copy_(output)

        reduction = Reduction("reduce_scatter", input_tensor, self.unit, transport)
        (self.slot.hook or CommHook()).reduce(reduction)


def reduce_scatter(output: Tensor, tensor: Tensor, **kwargs: Any) -> None:
    """torch's reduce-scatter of one tensor, by the name that this torch prefers."""
    newest = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    newest(output, tensor, **kwargs)
