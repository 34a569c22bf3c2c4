"""torch's DistributedDataParallel: every rank holds everything."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
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
        options: dict[str, Any] = {_sync_buffers_argument(): False}
        return DistributedDataParallel(
            encoders,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **options,
        )

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """DDP decides in the forward whether the backward reduces: ``no_sync`` spans both."""
        return nullcontext() if is_last else self.model.no_sync()


def _sync_buffers_argument() -> str:
    """What the option is called in this torch."""
    known = inspect.signature(DistributedDataParallel).parameters
    newer = "forward_sync_buffers"
    return newer if newer in known else "broadcast_buffers"
