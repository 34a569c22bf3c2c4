"""Encodes a stream of evaluation rows on all ranks without ever making one wait for ever.

Sharded engines need the same number of forwards on every rank. Before each batch the ranks ask
whether anyone has rows left; those that have none encode a dummy row and throw it away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.strategies.base import Strategy

T = TypeVar("T")


class EvalSample(NamedTuple):
    """One row of an evaluation set, as :func:`disco_ds.data.evaluation.read_samples` yields it."""

    row: int
    image: Tensor
    captions: list[str]
    label: int | None


def lockstep_batches(rows: Iterable[T], size: int, world: World) -> Iterator[list[T]]:
    """Batches of this rank's rows, the same number on every rank (empty ones at the end).

    One all-reduce of one number per batch.
    """
    iterator = iter(rows)
    while True:
        batch = list(islice(iterator, size))
        if not _any_rank(bool(batch), world):
            return
        yield batch


def _any_rank(flag: bool, world: World) -> bool:
    if world.world_size == 1:
        return flag
    total = torch.tensor(int(flag), device=world.device)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return bool(total.item())


def encode_images(strategy: Strategy, images: list[Tensor], image_size: tuple[int, int]) -> Tensor:
    """Unit-norm fp32 features ``[n, d]`` on the CPU; with no images a dummy forward, ``[0, d]``."""
    batch = torch.stack(images) if images else torch.zeros(1, 3, *image_size)
    features, _ = strategy.encode(batch.to(strategy.world.device), None)
    assert features is not None
    return F.normalize(features.float(), dim=-1)[: len(images)].cpu()


def encode_tokens(strategy: Strategy, tokens: Tensor) -> Tensor:
    """Unit-norm fp32 features ``[n, d]`` on the CPU; tokens of shape ``[0, L]`` are a dummy."""
    batch = tokens if len(tokens) else tokens.new_ones(1, tokens.shape[1])
    _, features = strategy.encode(None, batch.to(strategy.world.device))
    assert features is not None
    return F.normalize(features.float(), dim=-1)[: len(tokens)].cpu()


def encode_texts(strategy: Strategy, tokens: Tensor, batch_size: int) -> Tensor:
    """Features of the same ``[n, L]`` tokens on every rank, the work shared. ``[n, d]``, CPU.

    One all-gather of all features.
    """
    world = strategy.world
    own = tokens[world.rank :: world.world_size]
    parts = [
        encode_tokens(strategy, torch.stack(rows) if rows else tokens[:0])
        for rows in lockstep_batches(own, batch_size, world)
    ]
    gathered = all_gather_rows(torch.cat(parts), world)
    features = torch.empty(len(tokens), gathered[0].shape[1])
    for rank, rows in enumerate(gathered):
        features[rank :: world.world_size] = rows
    return features


def all_gather_rows(rows: Tensor, world: World) -> list[Tensor]:
    """Every rank's ``[n_r, ...]`` rows in rank order; n_r may differ and may be 0.

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
