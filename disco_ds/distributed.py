"""Who am I: ranks, process group, seeds and rank-aware logging.

The only module (with the losses) that asks torch.distributed for a rank. Everything else is
handed a :class:`World`.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from disco_ds.ranks import Ranks, resolve_ranks
from disco_ds.rendezvous import store_from_environment

T = TypeVar("T")

POLL_SECONDS = 0.5
_works = itertools.count()  # the same on all ranks, as calls of collectives are


@dataclass(frozen=True)
class World:
    """The place of this process among all processes of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ranks: Ranks = field(default_factory=Ranks, compare=False, repr=False)
    """Who says so, and whom that overrules."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to people."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, device: str = "auto") -> World:
        """The place that the launcher gave this process, by the order in :mod:`disco_ds.ranks`.

        Without a launcher this is a single process. ``device`` is "auto", "cpu" or "cuda". Exports
        RANK and its like, for the libraries that read them, and makes the rank's CUDA device the
        current one: NCCL, FSDP2 and Triton kernels go by it.

        Raises:
            ValueError: when the variables contradict each other, or CUDA was asked for in vain.
        """
        ranks = resolve_ranks(os.environ)
        if ranks.world_size > 1 or "RANK" in os.environ:
            ranks.export(os.environ)
        device_ = _pick_device(device, ranks.local_rank)
        if device_.type == "cuda":
            torch.cuda.set_device(device_)
        return cls(ranks.rank, ranks.world_size, ranks.local_rank, device_, ranks)


def device_index(local_rank: int, num_visible: int) -> int:
    """The CUDA device of a rank among those that its launcher lets it see.

    Raises:
        ValueError: fewer devices than ranks.
    """
    # Bound by the launcher: each rank sees its own as number 0.
    if num_visible == 1:
        return 0
    if local_rank >= num_visible:
        raise ValueError(
            f"LOCAL_RANK={local_rank} but {num_visible} CUDA devices are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): start "
            "one rank per GPU"
        )
    return local_rank


def _pick_device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no CUDA device. Use --device cpu.")
    return torch.device("cuda", device_index(local_rank, torch.cuda.device_count()))


def init_process_group(world: World, *, timeout_seconds: float) -> None:
    """Join the process group when there is more than one rank; nccl on CUDA, gloo on CPU.

    The time-out is an argument of the group, which is why it is a setting of ours: the
    environment variables that people try have no effect on it.

    Raises:
        ValueError: two ranks have the same GPU.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.world_size == 1 or dist.is_initialized():
        return
    dist.init_process_group(
        backend="nccl" if world.device.type == "cuda" else "gloo",
        store=store_from_environment(
            world.rank, world.world_size, os.environ, timeout_seconds=timeout_seconds
        ),
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    if world.device.type == "cuda":
        own = f"{socket.gethostname()} {torch.cuda.get_device_properties(world.device).uuid}"
        check_own_devices(_default_store(), world, own)


def check_own_devices(store: Store, world: World, own: str) -> None:
    """Refuse two ranks with one GPU, on all ranks, before NCCL does in its own words.

    Args:
        store: the group's; every rank writes ``own``, a name of its device, and rank 0 reads them.

    Raises:
        ValueError: naming the ranks and the remedy.
    """
    store.set(f"disco_ds/device/{world.rank}", own)
    if world.is_main:
        first_with: dict[bytes, int] = {}
        same = ""
        for rank in range(world.world_size):
            first = first_with.setdefault(store.get(f"disco_ds/device/{rank}"), rank)
            same = same or (f"{first} and {rank}" if first != rank else "")
        store.set("disco_ds/same_device", same)
    if pair := store.get("disco_ds/same_device").decode():
        raise ValueError(
            f"ranks {pair} were given the same GPU (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): start one rank per GPU"
        )


def destroy_process_group() -> None:
    """Leave the process group; harmless when there is none."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def use_timeout_everywhere(timeout_seconds: float) -> None:
    """Give every group of this process one time-out.

    Engines make groups of their own, with torch's time-out: ten minutes with NCCL.
    """
    if not dist.is_initialized():
        return
    c10d: Any = dist.distributed_c10d
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # before torch 2.14
    for group in list(c10d._world.pg_map):
        set_timeout(timedelta(seconds=timeout_seconds), group)


def exit_alone(status: int, world: World, error: BaseException | None = None) -> None:
    """End this process where leaving the group would wait for ranks that do not leave.

    For an error of this rank alone, which is reported if given. NCCL's ``destroy_process_group``
    waits for the other ranks' while they wait in a collective for this one. gloo's closes its
    connections, which ends their waiting: then this returns.
    """
    if world.world_size == 1 or world.device.type != "cuda":
        return
    if isinstance(error, (ValueError, OSError)):
        sys.stderr.write(f"error: rank {world.rank}: {error}\n")
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def while_main_works(
    world: World, work: Callable[[Callable[[], None]], T], *, tick: Callable[[], None]
) -> T | None:
    """Long work of the main rank, which the others follow without a collective that times out.

    Args:
        work: done on the main rank; calls its argument whenever it gets on.
        tick: called on every rank when the main rank gets on; for a watchdog.

    Returns:
        What ``work`` returns; None on the other ranks, also when it raised on the main rank.
    """
    if world.world_size == 1:
        return work(tick)
    store = PrefixStore(f"disco_ds/long_work/{next(_works)}", _default_store())
    if world.is_main:
        beats = _Beats(store, tick)
        try:
            return work(beats.beat)
        finally:
            store.set("done", "")
    seen = 0
    while not store.check(["done"]):
        if (now := store.add("beats", 0)) != seen:
            seen = now
            tick()
        time.sleep(POLL_SECONDS)
    return None


class _Beats:
    """Tells the other ranks, at most once a second, that there is progress."""

    def __init__(self, store: Store, tick: Callable[[], None]) -> None:
        self._store, self._tick, self._last = store, tick, 0.0

    def beat(self) -> None:
        """There is progress."""
        if (now := time.monotonic()) - self._last >= 1:
            self._last = now
            self._store.add("beats", 1)
        self._tick()


def _default_store() -> Store:
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def mean_over_ranks_(tensors: Sequence[torch.Tensor], world: World) -> None:
    """Replace float tensors by their mean over ranks, in place.

    One all-reduce of all elements together (``SUM`` then ``/ W``: gloo has no ``AVG``).
    """
    if world.world_size == 1 or not tensors:
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= world.world_size
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def sum_over_ranks(values: Sequence[float], world: World) -> list[float]:
    """Sum a few numbers over ranks in float64; one all-reduce of ``8 * len(values)`` bytes."""
    if world.world_size == 1:
        return [float(value) for value in values]
    device = world.device if world.device.type == "cuda" else torch.device("cpu")
    total = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def any_rank(flags: Sequence[bool], world: World) -> list[bool]:
    """For each flag, whether any rank has it set; one all-reduce of ``4 * len(flags)`` bytes."""
    if world.world_size == 1:
        return list(flags)
    raised = torch.tensor(list(flags), dtype=torch.int32, device=world.device)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in raised.tolist()]


def gather_objects(value: T, world: World) -> list[T]:
    """Every rank's small Python value, in rank order, on all ranks."""
    if world.world_size == 1:
        return [value]
    gathered: list[T] = [value] * world.world_size
    dist.all_gather_object(gathered, value)
    return gathered


def is_lost_contact(error: RuntimeError) -> bool:
    """Whether an error of torch.distributed says that another rank is gone or too slow.

    NCCL reports wrong set-ups, lack of memory and drivers by the same class of error.
    """
    text = str(error)
    if "NCCL error" in text:
        return "ncclRemoteError" in text
    if isinstance(error, dist.DistError):
        return True
    return any(sign in text for sign in ("closed by peer", "reset by peer", "gloo", "Broken pipe"))


class AgreedError(ValueError):
    """An error that every rank raises with the same text: one of them is enough to report it."""


def agree_on_error(error: BaseException | None, world: World) -> None:
    """Turn an error of any rank into one error on every rank, so that no rank waits in vain.

    Raises:
        AgreedError: on all ranks, with the text of the lowest failing rank, which is named
            unless it is the main rank (which works on behalf of all).
    """
    texts = gather_objects(None if error is None else str(error), world)
    first = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if first is not None:
        prefix = f"rank {first}: " if first else ""
        raise AgreedError(f"{prefix}{texts[first]}") from error


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Run a block on every rank; a ValueError or OSError of one becomes the same error on all.

    The block must not contain collectives that a failing rank would miss.
    """
    error: Exception | None = None
    try:
        yield
    except (ValueError, OSError) as caught:
        error = caught
    agree_on_error(error, world)


def broadcast_object(value: T | None, world: World) -> T:
    """The main rank's small Python value, on all ranks."""
    shared: list[T | None] = [value]
    if world.world_size > 1:
        dist.broadcast_object_list(shared, src=0)
    result = shared[0]
    assert result is not None
    return result


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch with a number of this rank's own (dropout differs by rank).

    Model initialisation does not depend on it: see :func:`disco_ds.models.create_clip`.
    """
    own = seed * 100_003 + rank
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


def setup_logging(world: World, *, verbose: bool = False) -> logging.Logger:
    """Log to stderr from the main rank; other ranks only speak up at WARNING."""
    logger = logging.getLogger("disco_ds")
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    tag = f"[rank {world.rank}] " if world.world_size > 1 and not world.is_main else ""
    handler.setFormatter(logging.Formatter(f"{tag}%(message)s"))
    logger.addHandler(handler)
    quiet = logging.INFO if world.is_main else logging.WARNING
    logger.setLevel(logging.DEBUG if verbose else quiet)
    logger.propagate = False
    if world.ranks.overruled:
        logger.info(
            "ranks from %s, not from %s", world.ranks.source, " or ".join(world.ranks.overruled)
        )
    return logger
