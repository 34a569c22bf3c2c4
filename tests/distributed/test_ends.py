"""Joining and leaving a group: shared GPUs, time-outs of all groups, errors of one rank alone."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed

from disco_ds.distributed import (
    World,
    check_own_devices,
    exit_alone,
    is_lost_contact,
    use_timeout_everywhere,
    while_main_works,
)
from disco_ds.strategies.base import local_rank_of_device

GPU = torch.device("cuda", 0)


def _devices(rank: int, world_size: int, names: dict[str, str]) -> None:
    store = dist.distributed_c10d._get_default_store()
    for number, (devices, refused) in enumerate(names.items()):
        own = dist.PrefixStore(str(number), store)
        world = World(rank, world_size, rank)
        if not refused:
            check_own_devices(own, world, devices[rank])
            continue
        with pytest.raises(ValueError, match=f"ranks {refused} were given the same GPU"):
            check_own_devices(own, world, devices[rank])


def test_two_ranks_with_one_gpu_are_named_on_all_ranks() -> None:
    run_distributed(_devices, {"abc": "", "aba": "0 and 2", "abb": "1 and 2"}, world_size=3)


def _long_work(rank: int, world_size: int) -> None:
    """The main rank works for longer than the group's time-out; the others see that it gets on."""
    world, ticks = World(rank, world_size, rank), []
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)

    def work(beat: Any) -> str:
        for _ in range(4):
            time.sleep(1)
            beat()
        return "done"

    found = while_main_works(world, work, tick=lambda: ticks.append(time.monotonic()))
    assert found == (None if rank else "done")
    assert len(ticks) >= 3
    with pytest.raises(ValueError, match="broken") if rank == 0 else nullcontext():
        while_main_works(world, _break, tick=lambda: None)
    dist.barrier()


def _break(beat: Any) -> None:
    raise ValueError("broken")


def test_long_work_of_the_main_rank_is_followed() -> None:
    run_distributed(_long_work, world_size=2)


def _timeouts(rank: int, world_size: int) -> None:
    groups = [None, dist.new_group([0, 1])]
    if rank == 0:
        groups.append(dist.new_group([0], use_local_synchronization=True))
    use_timeout_everywhere(77)
    cpu = torch.device("cpu")
    for group in groups:
        backend = (group or dist.group.WORLD)._get_backend(cpu)
        assert backend.options._timeout == timedelta(seconds=77)


def test_groups_of_engines_have_the_time_out_of_the_run() -> None:
    run_distributed(_timeouts, world_size=2)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (dist.DistBackendError("NCCL error in: x.cpp:94, ncclRemoteError: process exited"), True),
        (dist.DistBackendError("NCCL error in: x.cpp:94, invalid usage\nDuplicate GPU"), False),
        (dist.DistBackendError("NCCL error in: x.cpp:94, unhandled cuda error"), False),
        (RuntimeError("shape '[3]' is invalid"), False),
    ],
    ids=str,
)
def test_lost_contact_is_not_a_wrong_set_up(error: RuntimeError, expected: bool) -> None:
    assert is_lost_contact(error) == expected


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ""),
        (ValueError("x.tar: gone"), "error: rank 1: x.tar: gone\n"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
    ],
    ids=str,
)
def test_with_nccl_a_failing_rank_leaves_without_waiting(
    error: Exception | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    exit_alone(3, World(1, 2, 1, device=GPU), error)
    assert left == [3]
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("world", [World(1, 2, 1), World(device=GPU)], ids=["gloo", "one process"])
def test_elsewhere_leaving_waits_for_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("left"))
    exit_alone(1, world, ValueError("x"))


@pytest.mark.parametrize("before", [None, "3"])
@pytest.mark.parametrize(("device", "expected"), [(GPU, "0"), (torch.device("cpu"), None)])
def test_engines_find_the_gpu_that_a_launcher_bound(
    device: torch.device, expected: Any, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 3 of a node sees its GPU as number 0."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if before is not None:
        monkeypatch.setenv("LOCAL_RANK", before)
    with local_rank_of_device(World(3, 4, 3, device=device)):
        assert os.environ.get("LOCAL_RANK") == (expected or before)
    assert os.environ.get("LOCAL_RANK") == before
