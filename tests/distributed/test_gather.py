"""Tensors in pieces on the ranks are whole on the main rank, whatever the buckets."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import run_distributed
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.strategies.gather import Held, gather_on_main

SHAPES = [(3, 5), (), (0, 4), (7,), (2, 2, 2), (1,), (40,)]
DTYPES = [torch.float32] * 3 + [torch.float64] * 2 + [torch.bfloat16] * 2


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    pairs = enumerate(zip(SHAPES, DTYPES, strict=True))
    return {f"t{number}": torch.randn(shape).to(dtype) for number, (shape, dtype) in pairs}


def cut(count: int, rank: int, world_size: int, how: str) -> tuple[int, int]:
    """Start and number of this rank's elements."""
    if how == "last rank":
        return (0, count) if rank == world_size - 1 else (0, 0)
    if how == "main rank":
        return (0, count) if rank == 0 else (0, 0)
    size = -(-count // world_size)  # the last ranks get less, or nothing
    start = min(count, rank * size)
    return start, min(size, count - start)


def _gather(rank: int, world_size: int, how: str) -> None:
    world, expected = World(rank, world_size, rank), tensors()
    reads: list[str] = []

    def read(name: str, part: Tensor) -> Tensor:
        reads.append(name)
        # Engines pad their parts, and may keep them in another dtype.
        return torch.cat([part.double(), torch.full((2,), torch.nan, dtype=torch.float64)])

    held = []
    for name, tensor in expected.items():
        start, count = cut(tensor.numel(), rank, world_size, how)
        own = tensor.reshape(-1)[start : start + count]
        shape = tuple(tensor.shape)
        held.append(Held(name, shape, tensor.dtype, start, count, partial(read, name, own)))
    for bucket_bytes in (1, 80, 1 << 20):
        reads.clear()
        found = gather_on_main(held, world, bucket_bytes=bucket_bytes)
        assert sorted(reads) == [one.name for one in held if one.count]
        assert list(found) == (list(expected) if rank == 0 else [])
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
            assert torch.equal(tensor, expected[name]), (name, bucket_bytes)


@pytest.mark.parametrize("how", ["even", "last rank", "main rank"])
def test_whole_on_the_main_rank(how: str) -> None:
    run_distributed(_gather, how, world_size=3)


def test_one_process() -> None:
    _gather(0, 1, "even")
    assert gather_on_main([], World()) == {}
