"""torch's DistributedDataParallel: every rank holds everything."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from disco_ds.models import Encoders
from disco_ds.strategies.base import ensure_process_group
from disco_ds.strategies.plain import PlainStrategy


class DDPStrategy(PlainStrategy):
    """One all-reduce of all gradients a step, in buckets, during the last micro-batch's backward.

    Bytes a step: ``4 P`` for P trainable parameters. Buffers (BatchNorm's statistics) stay local
    until :meth:`average_buffers`: DDP would overwrite them with rank 0's at every forward.
    """

    name = "ddp"
    model: DistributedDataParallel

    def _wrap(self, encoders: Encoders) -> nn.Module:
        ensure_process_group(self.world)
        device = self.world.device
        return DistributedDataParallel(
            encoders,
            device_ids=[device.index] if device.type == "cuda" else None,
            **_options(),
        )

    def rehearse(self, image: Tensor, text: Tensor) -> None:
        """One throw-away step: DDP regroups gradients after its first, and sums them otherwise."""
        features = [part for part in self.model(image, text) if part.requires_grad]
        torch.stack([part.float().sum() for part in features]).sum().backward()
        self.optimizer.zero_grad(set_to_none=True)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """DDP decides in the forward whether the backward reduces: ``no_sync`` spans both."""
        return nullcontext() if is_last else self.model.no_sync()


def _options() -> dict[str, Any]:
    """Our arguments; the one about buffers changed its name."""
    known = inspect.signature(DistributedDataParallel).parameters
    newer = "forward_sync_buffers"
    buffers = newer if newer in known else "broadcast_buffers"
    return {"gradient_as_bucket_view": True, buffers: False}
