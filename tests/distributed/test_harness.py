"""The harness itself: a failing or dying rank fails the test quickly."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed


def _sum(rank: int, world_size: int) -> None:
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    assert value.item() == world_size * (world_size - 1) / 2


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def _die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(9)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_share_a_group(world_size: int) -> None:
    run_distributed(_sum, world_size=world_size)


def test_the_first_reason_is_raised() -> None:
    with pytest.raises(AssertionError, match="the reason"):
        run_distributed(_fail_on_one, world_size=2)


def test_a_dead_rank_ends_the_test() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError):
        run_distributed(_die_on_one, world_size=2)
    assert time.monotonic() - start < 30
