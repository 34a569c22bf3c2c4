"""Encodes a stream of evaluation rows on all ranks without ever making one wait for ever.

Sharded engines need the same number of forwards on every rank. Before each batch the ranks ask
whether anyone has rows left; those that have none encode a dummy batch and throw it away. Every
forward has the full batch size, padded with rows that are thrown away: kernels choose their
order of summation by shape, and a row must not depend on how many ranks share the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from disco_ds.distributed import World, agree_on_error

T = TypeVar("T")
Tokenize = Callable[[list[str]], Tensor]


class Encoder(Protocol):
    """What evaluation asks of a model: any :class:`disco_ds.strategies.base.Strategy` has it."""

    @property
    def world(self) -> World:
        """This process among those that share the work."""

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Features ``[b, d]``, not normalised. Collective."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Without gradients and without dropout."""

    def average_buffers(self) -> None:
        """Average BatchNorm's statistics over ranks."""


class EvalSample(NamedTuple):
    """One row of an evaluation set, as :func:`disco_ds.data.evaluation.read_samples` yields it."""

    row: int
    image: Tensor
    captions: list[str]
    label: int | None


NOTHING, ROWS, ERROR = range(3)


def lockstep_batches(rows: Iterable[T], size: int, world: World) -> Iterator[list[T]]:
    """Batches of this rank's rows, the same number on every rank (empty ones at the end).

    One all-reduce of one number per batch.

    Raises:
        AgreedError: on all ranks, when reading fails on any.
    """
    iterator = iter(rows)
    while True:
        batch, error = _next_batch(iterator, size)
        own = ERROR if error is not None else ROWS if batch else NOTHING
        most = _maximum(own, world)
        if most == ERROR:
            agree_on_error(error, world)
        if most == NOTHING:
            return
        yield batch


def _next_batch(iterator: Iterator[T], size: int) -> tuple[list[T], Exception | None]:
    try:
        return list(islice(iterator, size)), None
    except Exception as error:  # the others must hear of it, whatever it is
        return [], error


def _maximum(number: int, world: World) -> int:
    if world.world_size == 1:
        return number
    largest = torch.tensor(number, device=world.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())


def encode_images(
    encoder: Encoder, images: Sequence[Tensor], image_size: tuple[int, int], batch_size: int
) -> Tensor:
    """Unit-norm fp32 features ``[n, d]`` on the CPU of n <= batch_size images; n may be 0."""
    batch = torch.zeros(batch_size, 3, *image_size)
    for row, image in enumerate(images):
        batch[row] = image
    features, _ = encoder.encode(batch.to(encoder.world.device), None)
    assert features is not None
    return F.normalize(features[: len(images)].float(), dim=-1).cpu()


def encode_captions(
    encoder: Encoder, captions: Sequence[str], tokenize: Tokenize, batch_size: int
) -> Tensor:
    """Unit-norm fp32 features ``[n, d]`` on the CPU of this rank's captions; n may be 0."""
    parts = []
    for batch in lockstep_batches(captions, batch_size, encoder.world):
        tokens = tokenize(batch + [""] * (batch_size - len(batch)))
        _, features = encoder.encode(None, tokens.to(encoder.world.device))
        assert features is not None
        parts.append(F.normalize(features[: len(batch)].float(), dim=-1).cpu())
    return torch.cat(parts) if parts else torch.zeros(0, 0)


def encode_shared(
    encoder: Encoder, captions: Sequence[str], tokenize: Tokenize, batch_size: int
) -> Tensor:
    """Features of the same captions on every rank, the work shared: ``[n, d]``, CPU.

    One all-gather of all features.
    """
    world = encoder.world
    own = encode_captions(encoder, captions[world.rank :: world.world_size], tokenize, batch_size)
    gathered = all_gather_rows(own, world)
    features = torch.empty(len(captions), gathered[0].shape[1])
    for rank, rows in enumerate(gathered):
        features[rank :: world.world_size] = rows
    return features


def similarity(queries: Tensor, keys: Tensor) -> Tensor:
    """Inner products ``[q, k]`` of fp32 rows, summed in fp64 and rounded to fp32.

    So that equal features tie whatever the shapes, and no ranking hangs on rounding.
    """
    return (queries.double() @ keys.double().T).float()


def all_gather_rows(rows: Tensor, world: World) -> list[Tensor]:
    """Every rank's ``[n_r, ...]`` rows in rank order, on the CPU; n_r may differ and may be 0.

    One all-gather of the counts, one of the padded rows.
    """
    if world.world_size == 1:
        return [rows]
    counts = [
        torch.zeros(1, dtype=torch.int64, device=world.device) for _ in range(world.world_size)
    ]
    dist.all_gather(counts, torch.tensor([len(rows)], device=world.device))
    longest = max(int(count) for count in counts)
    padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype, device=world.device)
    padded[: len(rows)] = rows.to(world.device)
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded)
    return [part[: int(count)].cpu() for part, count in zip(gathered, counts, strict=True)]
