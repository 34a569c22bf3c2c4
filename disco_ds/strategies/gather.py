"""Whole tensors on the main rank, put together from what the ranks hold of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.distributed import World

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Held:
    """What this rank holds of one tensor: ``count`` consecutive elements of it, flattened."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    count: int
    read: Callable[[], Tensor]
    """At least ``count`` elements, of any shape and dtype, on any device; asked for once."""

    def values(self) -> Tensor:
        """``[count]``, in the dtype of the whole."""
        return self.read().detach().reshape(-1)[: self.count].to(self.dtype)


def gather_on_main(
    held: Sequence[Held], world: World, *, bucket_bytes: int = BUCKET_BYTES
) -> dict[str, Tensor]:
    """The tensors by name, on the CPU of the main rank; nothing on the others.

    Every rank lists the same tensors in the same order. One all-gather of 16 bytes a tensor and
    rank; then every element travels once, from the rank that holds it to the main rank, in
    buckets. Beside the result a rank needs two buckets, each of ``bucket_bytes`` or one tensor.
    """
    places = _places(held, world)
    whole: dict[str, Tensor] = {}
    under_way: _Bucket | None = None
    for part in _parts(held, bucket_bytes):
        following = _Bucket(held[part], places[:, part], world)
        whole |= under_way.arrived() if under_way else {}
        under_way = following
    whole |= under_way.arrived() if under_way else {}
    return whole


def _places(held: Sequence[Held], world: World) -> Tensor:
    """``[W, n, 2]``: where every rank's elements start, and how many they are."""
    own = torch.tensor([[one.start, one.count] for one in held], dtype=torch.int64)
    if world.world_size == 1:
        return own.reshape(1, -1, 2)
    own = own.to(world.device)
    everyone = [torch.empty_like(own) for _ in range(world.world_size)]
    dist.all_gather(everyone, own)
    return torch.stack(everyone).cpu()


def _parts(held: Sequence[Held], bucket_bytes: int) -> Iterator[slice]:
    """Stretches of the list whose tensors are of one dtype and of so many bytes together."""
    first, size = 0, 0
    for number, one in enumerate(held):
        num_bytes = prod(one.shape) * one.dtype.itemsize
        if number > first and (size + num_bytes > bucket_bytes or one.dtype != held[first].dtype):
            yield slice(first, number)
            first, size = number, 0
        size += num_bytes
    if first < len(held):
        yield slice(first, len(held))


class _Bucket:
    """Some tensors of one dtype on their way to the main rank."""

    def __init__(self, held: Sequence[Held], places: Tensor, world: World) -> None:
        self._held, self._places, self._world = held, places, world
        self._parcels: dict[int, Tensor] = {}
        counts = places[:, :, 1].sum(1).tolist()
        operations = []
        if world.is_main:
            for rank in range(1, world.world_size):
                if counts[rank]:
                    parcel = torch.empty(counts[rank], dtype=held[0].dtype, device=world.device)
                    self._parcels[rank] = parcel
                    operations.append(dist.P2POp(dist.irecv, parcel, rank))
        elif counts[world.rank]:
            parcel = torch.cat([one.values().to(world.device) for one in held if one.count])
            self._parcels[world.rank] = parcel
            operations.append(dist.P2POp(dist.isend, parcel, 0))
        # Alone, each pair of ranks would get a communicator of its own.
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def arrived(self) -> dict[str, Tensor]:
        """Wait; the whole tensors, on the main rank."""
        whole: dict[str, Tensor] = {}
        if self._world.is_main:
            whole = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in self._held}
            self._place(0, [one.values() for one in self._held if one.count], whole)
        for work in self._works:
            work.wait()
        if self._world.is_main:
            for rank, parcel in self._parcels.items():
                counts = [count for count in self._places[rank, :, 1].tolist() if count]
                self._place(rank, list(parcel.split(counts)), whole)
        return whole

    def _place(self, rank: int, values: list[Tensor], whole: dict[str, Tensor]) -> None:
        """Copy a rank's elements to where they belong."""
        places = zip(self._held, self._places[rank].tolist(), strict=True)
        filled = [(one.name, start) for one, (start, count) in places if count]
        for (name, start), part in zip(filled, values, strict=True):
            whole[name].view(-1)[start : start + len(part)].copy_(part)
