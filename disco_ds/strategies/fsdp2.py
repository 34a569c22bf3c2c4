"""FSDP2 (``fully_shard``): parameters, gradients and optimizer state spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from disco_ds.blocks import transformer_blocks
from disco_ds.models import Encoders
from disco_ds.strategies.base import EngineState, ensure_process_group
from disco_ds.strategies.gather import Held, gather_on_main
from disco_ds.strategies.plain import LOW_PRECISION, PlainStrategy


class FSDP2Strategy(PlainStrategy):
    """Every transformer block is a unit of its own, the rest of the model another.

    Each forward and each backward gathers a unit's parameters (``2 P`` bytes in bf16, each way);
    the last backward of a step reduces gradients (``4 P`` bytes in fp32).
    """

    name = "fsdp2"

    def _wrap(self, encoders: Encoders) -> nn.Module:
        ensure_process_group(self.world)
        shard: dict[str, Any] = {
            "mesh": init_device_mesh(self.world.device.type, (self.world.world_size,)),
            "mp_policy": self._precision_policy(),
            "offload_policy": self._offload_policy(),
            # Also for the root: what stays gathered after an evaluation would be stale after a
            # resumed state is written to the shards.
            "reshard_after_forward": self.config.reshard_after_forward,
        }
        for block in transformer_blocks(encoders):
            fully_shard(block, **shard)
        fully_shard(encoders, **shard)
        return encoders

    @contextmanager
    def leaves(self) -> Iterator[dict[str, Tensor]]:
        """The gathered parameters, found unit by unit: one more gathering of each.

        A unit keeps these tensor objects while it is sharded, without their data.
        """
        self._reshard()
        found: dict[str, Tensor] = {}
        for unit in self._units():
            unit.unshard()
            gathered = self._trainable().items()
            found |= {name: p for name, p in gathered if not isinstance(p, DTensor)}
            unit.reshard()
        try:
            yield found
        finally:
            self._reshard()

    def _precision_policy(self) -> MixedPrecisionPolicy:
        if self.precision == "fp32":
            return MixedPrecisionPolicy()
        reduce = torch.float32 if self.config.reduce_dtype == "fp32" else torch.bfloat16
        return MixedPrecisionPolicy(
            param_dtype=LOW_PRECISION[self.precision], reduce_dtype=reduce, output_dtype=None
        )

    def _offload_policy(self) -> OffloadPolicy:
        if not self.config.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the policy casts

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Reduce in the last backward only, unless every one is wanted."""
        self._root.set_requires_gradient_sync(is_last or self.config.reduce_every_micro_batch)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def _global_norm(self, gradients: list[Tensor]) -> float:
        """Norm of all shards. One all-reduce of one number."""
        own = torch.nn.utils.get_total_norm([_local(gradient) for gradient in gradients])
        square = own.to(self.world.device, torch.float64).square()
        dist.all_reduce(square, group=self.process_group)
        return math.sqrt(square) if torch.isfinite(square) else float(square)

    def state(self) -> EngineState:
        """Gather on the main rank, see :func:`~disco_ds.strategies.gather.gather_on_main`."""
        self._reshard()
        return super().state()

    def load_state(self, state: EngineState) -> None:
        """Every rank copies its own shards; no communication."""
        self._reshard()
        super().load_state(state)

    def _reshard(self) -> None:
        for unit in self._units():
            unit.reshard()

    def _units(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return gather_on_main([self._held(*named) for named in tensors.items()], self.world)

    def _held(self, name: str, tensor: Tensor) -> Held:
        """This rank's rows; a tensor that is not sharded belongs to the main rank."""
        own = _local(tensor)
        if isinstance(tensor, DTensor):
            start, count = self._first_row(tensor) * math.prod(tensor.shape[1:]), own.numel()
        else:
            start, count = 0, own.numel() * self.world.is_main
        return Held(name, tuple(tensor.shape), tensor.dtype, start, count, own.detach)

    def _first_row(self, whole: Tensor) -> int:
        return min(len(whole), self.world.rank * -(-len(whole) // self.world.world_size))

    def _copy(self, target: Tensor, value: Tensor) -> None:
        if not isinstance(target, DTensor):
            target.copy_(value)
            return
        local = target.to_local()
        start = self._first_row(value)
        local.copy_(value[start : start + len(local)])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
