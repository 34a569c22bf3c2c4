"""Runs a function on N gloo ranks, fast: fork-server workers that start with torch imported.

A worker is a top-level ``worker(rank, world_size, *args)``; its asserts are the test's asserts.
The processes meet through a file, never a port.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "open_clip",
]
GROUP_TIMEOUT_SECONDS = 60


def start_forkserver() -> None:
    """Import what workers need once; every later worker is a fork of that process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def _entry(
    worker: Callable[..., None],
    rank: int,
    world_size: int,
    store: str,
    error_file: str,
    args_file: str,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
        )
        worker(rank, world_size, *torch.load(args_file, weights_only=False))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(error_file).write_text(traceback.format_exc())
        os._exit(1)


def run_distributed(
    worker: Callable[..., None], *args: Any, world_size: int, timeout: float = 120
) -> None:
    """Run ``worker(rank, world_size, *args)`` on every rank and raise the first rank's failure."""
    import torch

    context = get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="disco-test-") as folder:
        errors = [Path(folder) / f"error-{rank}" for rank in range(world_size)]
        # Through a file: as process arguments, tensors would travel as one open file each.
        torch.save(args, f"{folder}/args")
        store = f"{folder}/store"
        processes = [
            context.Process(
                target=_entry,
                args=(worker, rank, world_size, store, str(errors[rank]), f"{folder}/args"),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        _raise_first(processes, errors)


def _wait(processes: list[Any], timeout: float) -> None:
    """Wait for all; when one fails, give the others a moment to fail by themselves, no longer."""
    import time

    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + 2)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _raise_first(processes: list[Any], errors: list[Path]) -> None:
    texts = [
        f"rank {rank}:\n{path.read_text()}" for rank, path in enumerate(errors) if path.exists()
    ]
    if texts:
        # The root cause is rarely the "connection closed by peer" of its neighbours.
        texts.sort(key=lambda text: "closed by peer" in text or "Connection reset" in text)
        raise AssertionError(texts[0])
    codes = [process.exitcode for process in processes]
    if any(code != 0 for code in codes):
        raise AssertionError(f"workers ended with {codes} (negative: killed, here at the time-out)")
