"""Write a safetensors file one tensor at a time; the library's writer wants all of them at once.

Format: 8 bytes length of the header, a JSON header, the tensors' bytes one after another
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """What the header says of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


class Sink(Protocol):
    """Where bytes go."""

    def write(self, block: Any, /) -> object:
        """Take over a bytes-like object."""
        ...


def write_tensors(sink: Sink, specs: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> None:
    """Write ``tensors``, which come in the order of ``specs`` and fit them; copies nothing."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        header[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sink.write(struct.pack("<Q", len(text)) + text)
    for spec, tensor in zip(specs, tensors, strict=True):
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ValueError(f"{spec.name}: {tensor.shape} {tensor.dtype} is not {spec}")
        flat = tensor.detach().contiguous().reshape(-1)
        sink.write(flat.view(torch.uint8).numpy().data)


def write_all(sink: Sink, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors on the CPU by name, in the order of the library: wide dtypes first."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    specs = [TensorSpec(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order]
    write_tensors(sink, specs, (tensors[name] for name in order))
