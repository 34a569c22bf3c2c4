"""What travels from the workers to the training process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One step's pairs of one rank."""

    image: Tensor
    """``[b, 3, S, S]`` float32."""
    text: Tensor
    """``[b, context]`` int64 token ids."""
    index: Tensor
    """``[b]`` int64 sample ids."""

    def pin_memory(self) -> Batch:
        """Copies in page-locked memory, for asynchronous transfers to a GPU."""
        return Batch(self.image.pin_memory(), self.text.pin_memory(), self.index.pin_memory())

    def to(self, device: torch.device, *, non_blocking: bool = True) -> Batch:
        """The same batch on a device."""
        tensors = (self.image, self.text, self.index)
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in tensors))


@dataclass(frozen=True)
class Delivery:
    """A batch and what it took to make it."""

    batch: Batch
    epoch: int
    step: int
    """Number of the batch in its epoch (under the present topology)."""
    position: int
    """Position of the slot after this batch."""
    counts: dict[str, int]
    """Samples seen, repeated and skipped by reason since the batch before, per source too."""

    def pin_memory(self) -> Delivery:
        """The same with a pinned batch; the DataLoader's pinning thread calls it."""
        return Delivery(self.batch.pin_memory(), self.epoch, self.step, self.position, self.counts)


class DataWorkerError(RuntimeError):
    """A worker was killed, or a transform or the tokenizer failed; one line."""


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker: one line and its story."""

    message: str
    details: str
    is_data_error: bool
    """The data is at fault (``ValueError`` for the user) rather than the program."""
