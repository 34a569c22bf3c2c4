"""FastCLIP's loss step against the original scheme, side by side: time, bytes, memory of the state.

    python tools/bench/fastclip.py [--samples 10000000] [--batch 1024] [--dim 512] [--ranks 2]

The baseline is the published scheme, written here from its description: every process keeps a
full copy of the running means of all samples; features, means and int64 ids are gathered; autograd
differentiates dense ``b x B`` similarities. Ours shards the means and recomputes tiles. Both
compute the v3 gradient with gamma = 1 on the same features; nothing is timed unless the gradients
agree. Ranks are gloo processes on this machine; each step is timed in turn, ours and theirs.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness import run_distributed, start_forkserver

from disco_ds.losses import FastCLIPLoss

RESULTS = Path(__file__).parent / "results" / "fastclip.csv"
TAU, RHO, EPS = 0.07, 6.5, 1e-14


class FullReplica:
    """The published scheme: replicated tables, gathered u and ids, dense similarities."""

    def __init__(self, num_samples: int) -> None:
        self.u = torch.zeros(2, num_samples)
        self.wire_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self.u.numel() * self.u.element_size()

    def gather(self, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        self.wire_bytes += own.numel() * own.element_size() * (len(parts) - 1)
        return torch.cat(parts, dim=1)

    def step(self, x: Tensor, y: Tensor, index: Tensor) -> None:
        """Leaves the exact v3 gradient (gamma = 1), times W, in ``x.grad`` and ``y.grad``."""
        b, rank = len(x), dist.get_rank()
        both = self.gather(torch.stack([x.detach(), y.detach()]))
        ids = self.gather(torch.stack([index, index])[:, :, None]).squeeze(2)
        size = both.shape[1]
        rows = torch.arange(b)
        mask = torch.ones(b, size, dtype=torch.int64)
        mask[rows, rank * b + rows] = 0
        sums = []
        similarity = (x @ both[1].T, y @ both[0].T)
        for s in similarity:
            h = s - (x * y).sum(1)[:, None]
            sums.append((torch.exp(h / TAU) * mask).sum(1) / (size - 1))
        means = torch.stack([g.detach() for g in sums])
        u = self.gather(means[:, :, None]).squeeze(2)
        self.u[:, ids[0]] = u
        own = TAU * sum((g / (EPS + mean)).sum() for g, mean in zip(sums, means, strict=True))
        other = self._negatives(x, y, both, u, mask)
        ((own + other) / size * dist.get_world_size()).backward()

    def _negatives(self, x: Tensor, y: Tensor, both: Tensor, u: Tensor, mask: Tensor) -> Tensor:
        """Own rows as the negatives of everybody's anchors."""
        size = both.shape[1]
        positives = (both[0] * both[1]).sum(1)
        as_text = torch.exp((y @ both[0].T - positives) / TAU) * mask / (EPS + u[0])
        as_image = torch.exp((x @ both[1].T - positives) / TAU) * mask / (EPS + u[1])
        return TAU * (as_text.sum() + as_image.sum()) / (size - 1)


def features(rank: int, step: int, batch: int, dim: int, samples: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    x, y = normalize(torch.randn(2, batch, dim, generator=generator), dim=2)
    index = torch.randperm(samples // 64, generator=generator)[:batch] * 64 + rank
    return x.requires_grad_(), y.requires_grad_(), index


def count_bytes(call, counted: list[int]):  # type: ignore[no-untyped-def]
    """Bytes this rank receives in the collectives of ``call`` (ring algorithms)."""
    world = dist.get_world_size()
    share = (world - 1) / world
    originals = {}

    def wrap(name: str, size) -> None:  # type: ignore[no-untyped-def]
        original = getattr(dist, name, None)
        if original is None:
            return
        originals[name] = original

        def counting(*args, **kwargs):  # type: ignore[no-untyped-def]
            counted[0] += int(size(*args) * share)
            return original(*args, **kwargs)

        setattr(dist, name, counting)

    def whole(tensor: Tensor, *_: object) -> int:
        return tensor.numel() * tensor.element_size()

    for name in ("all_gather_single", "all_gather_into_tensor", "all_to_all_single"):
        wrap(name, whole)
    wrap("all_reduce", lambda tensor, *_: 2 * whole(tensor))
    try:
        call()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _bench(rank: int, world_size: int, options: argparse.Namespace, output: str) -> None:
    ours = FastCLIPLoss("v3", num_samples=options.samples, gamma_min=1.0, rho=RHO, eps=EPS)
    theirs = FullReplica(options.samples)
    times: dict[str, list[float]] = {"ours": [], "original": []}
    counted = [0]
    for step in range(options.steps + 1):
        shape = (rank, step, options.batch, options.dim, options.samples)
        leaves = {name: features(*shape) for name in times}

        def run_ours(x: Tensor, y: Tensor, index: Tensor) -> None:
            ours(x, y, 1 / TAU, index=index).backward()
            ours.after_step(skipped=False)

        for name, run in (("ours", run_ours), ("original", theirs.step)):
            dist.barrier()
            start = time.perf_counter()
            if name == "ours" and step == 1:
                count_bytes(partial(run_ours, *leaves["ours"]), counted)
            else:
                run(*leaves[name])
            dist.barrier()
            if step > 0:
                times[name].append(time.perf_counter() - start)
        own, original = (leaves[name][0].grad for name in ("ours", "original"))
        assert own is not None and original is not None
        relative = float((own - original).norm() / original.norm())
        assert relative < 1e-4, f"gradients differ by {relative:.1e}: nothing is timed"
    if rank == 0:
        rows = {
            "ours": (times["ours"], counted[0], ours.table.num_bytes),
            "original": (
                times["original"],
                theirs.wire_bytes // (options.steps + 1),
                theirs.num_bytes,
            ),
        }
        write(rows, options, world_size, Path(output))


def write(rows: dict, options: argparse.Namespace, world_size: int, path: Path) -> None:  # type: ignore[type-arg]
    path.parent.mkdir(parents=True, exist_ok=True)
    header = ["scheme", "median_ms", "min_ms", "max_ms", "wire_bytes", "state_bytes"]
    header += ["ranks", "batch_per_rank", "dim", "samples", "torch", "machine", "date"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for name, (seconds, wire, state) in rows.items():
            ms = [1000 * value for value in seconds]
            numbers = [f"{f(ms):.1f}" for f in (statistics.median, min, max)]
            setting = [world_size, options.batch, options.dim, options.samples, torch.__version__]
            writer.writerow(
                [name, *numbers, wire, state, *setting, platform.machine(), datetime.date.today()]
            )
    ratios = [a / b for a, b in zip(rows["ours"][0], rows["original"][0], strict=True)]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(path.read_text(), end="")
    print(
        f"in short: ours/original: time {middle:.2f} ({low:.2f} to {high:.2f}), "
        f"wire {rows['ours'][1] / rows['original'][1]:.2f}, "
        f"state {rows['ours'][2] / rows['original'][2]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=1024, help="pairs per rank")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--output", default=str(RESULTS))
    options = parser.parse_args()
    start_forkserver()
    run_distributed(_bench, options, options.output, world_size=options.ranks, timeout=900)


if __name__ == "__main__":
    main()
