"""FSDP2 (``fully_shard``): parameters, gradients and optimizer state spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

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

    @property
    def has_whole_parameters(self) -> bool:
        """Shards."""
        return False

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
        """Gather tensor by tensor, on the main rank. One all-gather per tensor and kind."""
        self._reshard()
        return super().state()

    def load_state(self, state: EngineState) -> None:
        """Every rank copies its own shards; no communication."""
        self._reshard()
        super().load_state(state)

    def _reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        whole: Tensor = cast(DTensor, tensor.to(self.world.device)).full_tensor()
        return whole

    def _copy(self, target: Tensor, value: Tensor) -> None:
        if not isinstance(target, DTensor):
            target.copy_(value)
            return
        local = target.to_local()
        start = self.world.rank * -(-len(value) // self.world.world_size)
        local.copy_(value[start : start + len(local)])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
