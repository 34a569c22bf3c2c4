"""Measurements of losses at one size, on new processes: costs one by one, times in turn."""

from __future__ import annotations

import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from losses_baselines import PROVIDERS, SIGLIP_BIAS, Provider
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from disco_ds.losses import reference

PRELOAD = ["torch", "torch.distributed.nn", "torch.utils.flop_counter", "open_clip.loss"]
PARITY_PAIRS = 192
MIB = 2**20


@dataclass(frozen=True)
class Setup:
    """What is measured: ``pairs`` per rank, on ``ranks`` ranks of one thread each."""

    ranks: int
    pairs: int
    dim: int
    scale: float
    device: str = "cpu"


def measure_costs(provider: str, setup: Setup) -> dict[str, float]:
    """Measure memory, bytes, products and gradient error, in processes that did nothing else."""
    results = _run(_costs_of_rank, setup, provider)
    return {**results[0], "peak_mib": max(result["peak_mib"] for result in results)}


def measure_times(providers: list[str], setup: Setup, rounds: int) -> list[dict[str, Samples]]:
    """Time all providers in turn, ``rounds`` times, in the same processes.

    Whatever else the machine does meets all of them alike. Returns rank 0's samples, one per
    provider and round.
    """
    samples: list[dict[str, Samples]] = _run(_times_of_rank, setup, providers, rounds)[0]
    return samples


class Samples(NamedTuple):
    """One step: milliseconds on the clock, and of this rank's processor."""

    clock_ms: float
    cpu_ms: float


def _run(work: Callable[..., Any], setup: Setup, *args: Any) -> list[Any]:
    """Run ``work(rank, setup, *args)`` on new ranks and return what they return, by rank."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="bench-losses-") as folder:
        queue = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(work, rank, setup, f"{folder}/store", queue, args))
            for rank in range(setup.ranks)
        ]
        for process in processes:
            process.start()
        results = dict(queue.get() for _ in processes)
        for process in processes:
            process.join()
    for rank, error in results.items():
        if isinstance(error, Exception):
            raise RuntimeError(f"rank {rank} of {setup} failed") from error
    return [results[rank] for rank in range(setup.ranks)]


def _rank(
    work: Callable[..., Any], rank: int, setup: Setup, store: str, queue: Any, args: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if setup.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if setup.device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=setup.ranks,
    )
    try:
        queue.put((rank, work(rank, setup, *args)))
    except Exception as error:
        queue.put((rank, error))
        raise
    dist.barrier()
    dist.destroy_process_group()


def _costs_of_rank(rank: int, setup: Setup, name: str) -> dict[str, float]:
    provider = PROVIDERS[name]
    loss = provider.make(rank, setup.ranks)
    errors = parity(provider, loss, setup, rank)
    step, leaves = make_step(loss, setup, setup.pairs, rank)
    return {**errors, **_costs(step, leaves, setup)}


def _times_of_rank(
    rank: int, setup: Setup, names: list[str], rounds: int
) -> list[dict[str, Samples]]:
    steps = {
        name: make_step(PROVIDERS[name].make(rank, setup.ranks), setup, setup.pairs, rank)
        for name in names
    }
    if rounds > 3:
        one_round(steps, setup)  # warms up; large steps do not need it
    return [one_round(steps, setup) for _ in range(rounds)]


def one_round(
    steps: dict[str, tuple[Callable[[], None], list[Tensor]]], setup: Setup
) -> dict[str, Samples]:
    samples = {}
    for name, (step, leaves) in steps.items():
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        if setup.device == "cuda":
            torch.cuda.synchronize()
        clock, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        samples[name] = Samples(clock * 1e3, cpu * 1e3)
        forget(leaves)
    return samples


def _features(pairs: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return matching unit features: partners have a cosine of about 0.7."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, pairs, dim, generator=generator)
    return normalize(x, dim=1), normalize(x + noise, dim=1)


def make_step(
    loss: Callable[..., Tensor], setup: Setup, pairs: int, rank: int
) -> tuple[Callable[[], None], list[Tensor]]:
    features = (f.to(setup.device) for f in _features(pairs, setup.dim, rank))
    scale = torch.tensor(setup.scale, device=setup.device)
    leaves = [leaf.requires_grad_() for leaf in (*features, scale)]

    def step() -> None:
        loss(*leaves).backward()

    return step, leaves


def parity(
    provider: Provider, loss: Callable[..., Tensor], setup: Setup, rank: int
) -> dict[str, float]:
    """Compare gradients after a mean over ranks with float64 on one process, at a small size.

    ``gradient_scale`` is the best factor between them, ``gradient_error`` what it leaves, relative
    to the largest entry.
    """
    step, leaves = make_step(loss, setup, PARITY_PAIRS, rank)
    step()
    parts = [_features(PARITY_PAIRS, setup.dim, other) for other in range(setup.ranks)]
    full = [
        torch.cat(side).to(provider.wire_dtype or torch.float32)
        for side in zip(*parts, strict=True)
    ]
    exact = [side.double().requires_grad_() for side in full]
    x, y = exact
    if provider.kind == "infonce":
        value = reference.info_nce(x, y, setup.scale)
    else:
        value = reference.siglip(x, y, setup.scale, SIGLIP_BIAS)
    rows = slice(rank * PARITY_PAIRS, (rank + 1) * PARITY_PAIRS)
    want = torch.cat([g[rows] for g in torch.autograd.grad(value, exact)])
    gradients = [leaf.grad for leaf in leaves[:2] if leaf.grad is not None]
    got = torch.cat([gradient.double().cpu() for gradient in gradients]) / setup.ranks
    factor = float((got * want).sum() / want.square().sum())
    error = float((got - factor * want).abs().max() / (factor * want).abs().max())
    return {"gradient_scale": factor, "gradient_error": error}


def _costs(step: Callable[[], None], leaves: list[Tensor], setup: Setup) -> dict[str, float]:
    """Return peak memory over what was there before, bytes received and products, of one step."""
    wire = Wire(setup.ranks)
    flops = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})
    gc.collect()
    dist.barrier()
    with _peak_memory(setup.device) as peak, wire.counting(), flops:
        step()
    forget(leaves)
    product = 2 * setup.pairs * setup.pairs * setup.ranks * setup.dim
    return {
        "peak_mib": peak[0] / MIB,
        "wire_mb": wire.received / 1e6,
        "products": flops.get_total_flops() / product,
    }


def _addmm_flops(out: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * a[0] * a[1] * b[1])


def forget(leaves: list[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


@contextmanager
def _peak_memory(device: str) -> Iterator[list[float]]:
    """Fill the list with the peak over the current use: resident memory on CPU (Linux)."""
    peak: list[float] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        yield peak
        peak.append(torch.cuda.max_memory_allocated() - base)
        return
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    base = _status("VmRSS")
    yield peak
    peak.append(_status("VmHWM") - base)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Wire:
    """Bytes received per rank, with every collective done as a ring."""

    def __init__(self, ranks: int) -> None:
        self.received = 0.0
        self._share = (ranks - 1) / ranks

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the collectives of ``torch.distributed`` called in this block."""
        counters: dict[str, tuple[int, float]] = {  # argument that holds all shares, and factor
            "all_gather": (0, 1),
            "all_gather_single": (0, 1),
            "all_gather_into_tensor": (0, 1),
            "all_to_all": (0, 1),
            "all_to_all_single": (0, 1),
            "scatter": (0, 1),  # torch's gather takes it for its backward on gloo
            "reduce_scatter": (1, 1),
            "reduce_scatter_single": (1, 1),
            "reduce_scatter_tensor": (1, 1),
            "all_reduce": (0, 2),
        }
        patches = [
            patch.object(dist, name, self._counted(getattr(dist, name), *how))
            for name, how in counters.items()
            if hasattr(dist, name)
        ]
        patches.append(patch.object(dist, "batch_isend_irecv", self._point_to_point()))
        for item in patches:
            item.start()
        try:
            yield
        finally:
            for item in patches:
                item.stop()

    def _counted(self, collective: Any, position: int, factor: float) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = args[position]
            tensors = [tensors] if isinstance(tensors, Tensor) else tensors
            self.received += factor * self._share * sum(tensor.nbytes for tensor in tensors)
            return collective(*args, **kwargs)

        return call

    def _point_to_point(self) -> Any:
        original = dist.batch_isend_irecv

        def call(operations: Any) -> Any:
            incoming = (op for op in operations if op.op is dist.irecv)
            self.received += sum(op.tensor.nbytes for op in incoming)
            return original(operations)

        return call
