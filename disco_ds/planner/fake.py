"""A world without hardware: fake tensors on a fake device, and a process group of any size.

Fake tensors have shapes, dtypes and storage sizes but no values, and torch's ``fake`` process group
answers for all other ranks; everything else (models, engines, autograd, optimizers) is the code
that trains. A handful of places cannot work without values or without peers and are replaced while
the world lasts; each says why.

The fake device is the CPU, because the backward pass of fake CUDA tensors asks for a real driver.
With ``like_cuda`` it follows CUDA where the two allocate differently: autocast keeps normalisations
in fp32, optimizers update many tensors at once, tiles of the loss are those of a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.distributed import World
from disco_ds.losses.pairwise import GPU_TILE_SIZE
from disco_ds.models import Encoders, ModelConfig, create_clip
from disco_ds.planner.repeats import repeating

# DDP's own numbers.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
# What deepspeed.utils.groups remembers of the world, before it has seen one.
FRESH_GROUPS: dict[str, Any] = {
    "_WORLD_GROUP": None,
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": None,
    "_ALL_TO_ALL_GROUP": {},
    "mesh_device": None,
    "mpu": None,
}
# Under CUDA's autocast these compute in fp32, under the CPU's in the dtype of their input.
FP32_ON_CUDA = ("layer_norm", "group_norm", "softmax", "log_softmax", "normalize", "softplus")


@contextmanager
def fake_world(world_size: int | None, *, like_cuda: bool) -> Iterator[World]:
    """Make this process rank 0 of ``world_size`` fake ranks, on fake tensors.

    A single rank has a fake group too: engines would found a real one, which outlives the trace.
    None is one rank without any, for what communicates nothing: allowed in the midst of a run.

    Raises:
        ValueError: this process has a process group of its own.
    """
    if world_size is not None and dist.is_initialized():
        raise ValueError("a trace needs a process without a process group of its own")
    with ExitStack() as stack:
        if world_size is not None:
            _set_environment(stack, world_size)
            _join_fake_group(stack, world_size)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(StandIns(world_size or 1))
        for owner, name, value in _replacements(like_cuda):
            _replace(stack, owner, name, value)
        yield World(0, world_size or 1, 0)


def fake_encoders(config: ModelConfig) -> tuple[Encoders, tuple[int, int], int]:
    """The encoders as :func:`create_clip` builds them, fake; image size and context length.

    Call inside :func:`fake_world`.
    """
    with unset_fake_temporarily():
        parts = create_clip(config, seed=0, device="meta")
    make_fake_(parts.encoders)
    return parts.encoders, parts.image_size, context_length(config.name)


def make_fake_(module: nn.Module) -> None:
    """Replace all parameters and buffers, in place, by fake ones of the same shape."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                child._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def context_length(name: str) -> int:
    """Tokens of a text."""
    import open_clip

    config: Any = open_clip.get_model_config(name)
    return int(config["text_cfg"].get("context_length", 77))


class StandIns(TorchDispatchMode):
    """Results that depend on values: numbers read, distinct elements, elements under a mask.

    A number read is 1 (finite, not zero) and a flag is False; all elements are distinct, and a mask
    of samples selects the share of one rank.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._world_size = world_size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            return _number(args[0])
        if func is aten._unique2.default:
            return _all_distinct(args[0])
        if func is aten.index.Tensor and _has_mask(args[1]):
            rows = -(-args[1][-1].shape[0] // self._world_size)
            return args[0].new_empty(rows, *args[0].shape[len(args[1]) :])
        if func is aten.index_put_.default and _has_mask(args[1]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _number(tensor: Tensor) -> float | int | bool:
    if tensor.dtype == torch.bool:
        return False
    if tensor.dtype == torch.uint8:  # DeepSpeed's overflow flag
        return 0
    return 1.0 if tensor.is_floating_point() else 1


def _all_distinct(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, place of every element, how often each value occurs."""
    places = [torch.empty(values.shape, dtype=torch.int64) for _ in range(2)]
    return values.clone(), places[0], places[1]


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What CUDA's autocast makes of a function that it runs in fp32."""

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            full = {key: _full(value) for key, value in kwargs.items()}
            return function(*(_full(value) for value in args), **full)

    return wrapped


def _full(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _set_environment(stack: ExitStack, world_size: int) -> None:
    wanted = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    wanted |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    stack.callback(restore)


def _join_fake_group(stack: ExitStack, world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    stack.callback(dist.destroy_process_group)


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Until the stack ends; what the owner only inherits is inherited again."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _replacements(like_cuda: bool) -> Iterable[tuple[Any, str, Any]]:
    """What cannot work without values or peers: (owner, attribute, stand-in)."""
    import torch.nn.parallel.distributed as ddp

    from disco_ds.losses import base
    from disco_ds.strategies import fsdp2

    # Swaps tensors, which fake ones that are referred to refuse.
    yield nn.Module, "_apply", _apply
    # Compares the shapes that peers report.
    yield ddp, "_verify_param_shape_across_processes", _nothing
    # Reads where this rank stands in the mesh.
    yield fsdp2, "init_device_mesh", _without_fake(init_device_mesh)
    # A loss works on one block per rank, each as the last.
    yield from repeating()
    if not like_cuda:
        newest = "reduce_scatter_single"  # since torch 2.14
        name = newest if hasattr(dist, newest) else "reduce_scatter_tensor"
        for owner in (dist, dist.distributed_c10d):
            yield owner, name, _on_a_copy(getattr(owner, name))
    else:
        yield base, "default_tile_size", lambda device: GPU_TILE_SIZE
        for name in FP32_ON_CUDA:
            yield F, name, _in_fp32(getattr(F, name))


def _on_a_copy(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """A reduce-scatter as gloo does it: on a copy of its input."""

    def wrapped(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = input.clone()
        result = reduce_scatter(output, input, *args, **kwargs)
        del copy
        return result

    return wrapped


@contextmanager
def fake_deepspeed() -> Iterator[None]:
    """The same for DeepSpeed; only entered for its engines, for its import takes seconds."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm import comm
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero import partition_parameters, stage3
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.utils import groups

    with ExitStack() as stack:
        # Compares the order of modules that peers report.
        _replace(stack, coordinator, "assert_ints_same_as_other_ranks", _nothing)
        # One operator per rank and parameter otherwise: minutes for a thousand ranks.
        _replace(stack, partition_parameters.AllGatherCoalescedHandle, "wait", _wait_for_gather)
        _replace(stack, stage3, "reduce_scatter_coalesced", _reduce_scatter_coalesced)
        # Engines with "torch_autocast" leave it on for those that follow.
        _replace(stack, torch_autocast, "TORCH_AUTOCAST_INITIALIZED", False)
        _replace(stack, torch_autocast, "TORCH_AUTOCAST_DTYPE", None)
        # The stand-in for the GPU computes nothing, so it can do fp16.
        _replace(stack, get_accelerator(), "is_fp16_supported", lambda: True)
        # DeepSpeed keeps its backend and its groups, those of an earlier world, for ever.
        _replace(stack, comm, "cdb", None)
        for name, value in FRESH_GROUPS.items():
            _replace(stack, groups, name, value.copy() if isinstance(value, dict) else value)
        yield


def _wait_for_gather(self: Any, handle_dependency: bool = True) -> None:
    """DeepSpeed's ``AllGatherCoalescedHandle.wait``: one new tensor per gathered parameter."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if self.complete:
        return
    self.allgather_handle.wait()
    for parameter in self.params:
        whole = self.partitions[0].new_empty(parameter.ds_numel)
        parameter.data = whole.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    self.complete = True


def _reduce_scatter_coalesced(tensors: list[Tensor], group: Any = None) -> list[Tensor]:
    """DeepSpeed's function of this name: one flat input, padded tensor by tensor."""
    from deepspeed import comm

    world_size = comm.get_world_size(group)
    parts = [-(-tensor.numel() // world_size) for tensor in tensors]
    if len(tensors) == 1 and tensors[0].numel() % world_size == 0:
        flat = tensors[0].view(-1)
    else:
        flat = tensors[0].new_empty(sum(parts) * world_size)
    flat.div_(world_size)
    own = flat.narrow(0, 0, sum(parts))
    comm.reduce_scatter_fn(own, flat, group=group, async_op=False)
    return list(own.split(parts))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return


def _without_fake(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return wrapped


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` by ``.data``: keeps the parameter objects, as on real tensors."""
    for child in self.children():
        child._apply(fn)
    for parameter in self._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                changed = fn(parameter.data)
            parameter.data = changed
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


@contextmanager
def ddp_buckets_in(order: Sequence[int]) -> Iterator[None]:
    """Give DDP the buckets that it rebuilds after its first step, from the start.

    The first step sends everything at once. Then DDP assigns parameters to buckets in the order
    in which their gradients arrived (``order``, positions among the trainable parameters) and
    tells its peers, for which it needs values.
    """
    plain = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def assign(parameters: list[Tensor], limits: Any, sparse: Any) -> Any:
        caps = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
        indices, sizes = plain([parameters[i] for i in order], caps, [], list(order))
        return indices[::-1], sizes[::-1]  # DDP turns them round

    class Reducer(dist.Reducer):  # type: ignore[name-defined, misc]
        def _rebuild_buckets(self) -> bool:
            return False

    with ExitStack() as stack:
        _replace(stack, dist, "_compute_bucket_assignment_by_size", assign)
        _replace(stack, dist, "Reducer", Reducer)
        yield
