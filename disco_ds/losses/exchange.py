"""All communication of the losses: features as a stream of blocks, and a few scalars per sample.

Bytes are those received per rank, without the common factor ``(W - 1) / W``: ``b`` pairs per rank,
``B = W b``, ``s`` bytes per feature element on the wire. Ranks with fewer rows than the largest
are padded where a collective wants equal shares. Nothing here needs ``torch.distributed`` for one
process: every method then returns its own argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.losses.inputs import has_values


class Blocks(Protocol):
    """The features of all ranks, as ``(rank, [n_rank, d])``, own block first.

    Every rank must consume the whole stream, each time it iterates.
    """

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Start over from the own block."""
        ...


class Exchange:
    """The collectives of one process group; ``None`` is the default group, or a single process."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = process_group
        is_distributed = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(process_group) if is_distributed else 1
        self.rank = dist.get_rank(process_group) if is_distributed else 0
        if self.rank < 0:
            raise ValueError("this rank is not a member of the loss's process_group")

    def all_rows(self, row: Sequence[float], device: torch.device) -> list[list[float]]:
        """Return every rank's row of numbers. One all-gather of ``8 W len(row)`` bytes."""
        own = torch.tensor(row, dtype=torch.float64, device=device)
        if self.world_size == 1:
            return [list(row)]
        rows = own.new_empty(self.world_size, len(row))
        self._all_gather(rows, own)
        if not has_values(rows):
            return [list(row)] * self.world_size
        result: list[list[float]] = rows.tolist()
        return result

    def stream(self, own: Tensor, sizes: Sequence[int], gather: str) -> Blocks:
        """Stream the blocks of all ranks; ``gather`` is ``"all"`` or ``"ring"``.

        ``"all"`` starts one all-gather of ``s B d`` bytes now and keeps its result; ``"ring"``
        sends ``s B d`` bytes at every iteration and keeps two blocks.
        """
        own = own.contiguous()
        if self.world_size == 1:
            return [(0, own)]
        if gather == "ring":
            return RingBlocks(own, sizes, self)
        return GatheredBlocks(own, sizes, self)

    def gather_vectors(self, own: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return every rank's vector. One all-gather of ``itemsize * W * max(lengths)`` bytes."""
        if self.world_size == 1:
            return [own]
        gathered = own.new_empty(self.world_size, max(lengths))
        self._all_gather(gathered, _pad_rows(own, max(lengths)))
        return [part[:length] for part, length in zip(gathered, lengths, strict=True)]

    def return_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """Send ``parts[m]`` ([n_m]) to rank m; return ``[W, n]``, what all ranks know of our rows.

        One all-to-all of ``itemsize * W * n`` bytes.
        """
        own = parts[self.rank]
        if self.world_size == 1:
            return own[None]
        received = own.new_empty(self.world_size, len(own))
        dist.all_to_all_single(
            received.view(-1),
            torch.cat(list(parts)),
            [len(own)] * self.world_size,
            [len(part) for part in parts],
            group=self.group,
        )
        return received

    def reduce_scatter(self, parts: Tensor, rows: int) -> Tensor:
        """Sum ``parts`` ([W, max n, d]) over ranks; return our own ``rows``.

        One reduce-scatter of ``itemsize * B d`` bytes.
        """
        total = torch.empty_like(parts[0])
        scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
        scatter(total, parts.flatten(0, 1), group=self.group)
        return total[:rows]

    def all_reduce(self, parts: Tensor, rows: int) -> Tensor:
        """As :meth:`reduce_scatter` by DisCo-CLIP's all-reduce, which moves twice the bytes."""
        dist.all_reduce(parts, group=self.group)
        return parts[self.rank, :rows].clone()  # a view would keep all parts until backward

    def _all_gather(self, out: Tensor, own: Tensor, async_op: bool = False) -> dist.Work | None:
        gather = _newest("all_gather_single", "all_gather_into_tensor")
        work: dist.Work | None = gather(out.flatten(0, 1), own, group=self.group, async_op=async_op)
        return work


class GatheredBlocks:
    """One all-gather, under way while the own block is worked on; then all blocks, from memory."""

    def __init__(self, own: Tensor, sizes: Sequence[int], exchange: Exchange) -> None:
        self._own, self._sizes, self._exchange = own, sizes, exchange
        self._padded = _pad_rows(own, max(sizes))
        self._gathered = own.new_empty(len(sizes), *self._padded.shape)
        self._work = exchange._all_gather(self._gathered, self._padded, async_op=True)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        rank, world_size = self._exchange.rank, self._exchange.world_size
        yield rank, self._own
        if self._work is not None:
            self._work.wait()
            self._work = None
        for step in range(1, world_size):
            other = (rank - step) % world_size
            yield other, self._gathered[other, : self._sizes[other]]


class RingBlocks:
    """Blocks that go round the ring: the next one travels while the current one is worked on."""

    def __init__(self, own: Tensor, sizes: Sequence[int], exchange: Exchange) -> None:
        self._own, self._sizes, self._exchange = own, sizes, exchange
        self._spare = [own.new_empty(max(sizes), own.shape[1]) for _ in range(2)]

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        rank, world_size = self._exchange.rank, self._exchange.world_size
        current = self._own
        for step in range(world_size - 1):
            following = (rank - step - 1) % world_size
            incoming = self._spare[step % 2][: self._sizes[following]]
            works = self._shift(current, incoming)
            yield (rank - step) % world_size, current
            for work in works:
                work.wait()
            current = incoming
        yield (rank + 1) % world_size, current

    def _shift(self, outgoing: Tensor, incoming: Tensor) -> list[dist.Work]:
        exchange = self._exchange
        group = exchange.group or dist.group.WORLD
        assert group is not None
        neighbours = ((exchange.rank + 1), (exchange.rank - 1))
        right, left = (
            dist.get_global_rank(group, rank % exchange.world_size) for rank in neighbours
        )
        works: list[dist.Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, right, group),
                dist.P2POp(dist.irecv, incoming, left, group),
            ]
        )
        return works


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    if len(tensor) == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded


def _newest(name: str, older: str):  # type: ignore[no-untyped-def]
    """Return the collective under its name since torch 2.14, or the one before it."""
    return getattr(dist, name, None) or getattr(dist, older)
