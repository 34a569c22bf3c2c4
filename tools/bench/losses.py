"""Contrastive losses side by side: time, memory, bytes, products and gradient error.

    python tools/bench/losses.py                      # 2 ranks up to 8192 pairs each, 4 ranks
    python tools/bench/losses.py --ranks 2 --pairs 512 1024 --providers open_clip ours

Every number of a row comes from one set of fresh processes with one thread per rank. Time is on the
clock (median and 20/80 % quantiles) and of rank 0's processor. Memory is the peak of resident
memory over what was resident before the step (features included in that), on the worst rank. A
speed-up is printed only for a loss whose gradients match float64. The floor is the time of the
fewest products any exact method needs, at the speed of a bare ``torch.mm``.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import time
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from losses_baselines import PROVIDERS, REFERENCES
from losses_measure import Setup, measure

RESULTS = Path(__file__).parent / "results"
# Logits of all pairs, their softmax and its gradient; more than this and the rank is skipped.
GLOBAL_BYTES_PER_LOGIT = 24
FLOOR_PRODUCTS = 3  # logits once, and one product per side
MAX_ERROR, MAX_SCALE_ERROR = 1e-4, 1e-3


def main() -> None:
    options = _parse()
    rows: list[dict[str, Any]] = []
    gflops = _product_gflops(options.dim)
    for ranks, sizes in ((2, options.pairs), (4, options.pairs_of_4)):
        for pairs in sizes if ranks in options.ranks else ():
            rows += _compare(options, ranks, pairs, gflops)
            _write(options.output, rows)
    print(f"wrote {options.output}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=(2, 4))
    parser.add_argument("--pairs", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--pairs_of_4", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--scale", type=float, default=14.3)
    parser.add_argument("--seconds", type=float, default=5.0, help="to spend on repetitions")
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS / "losses.csv")
    return parser.parse_args()


def _compare(
    options: argparse.Namespace, ranks: int, pairs: int, gflops: float
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in options.providers:
        if not _fits(name, ranks, pairs):
            print(f"{name}: {ranks} x {pairs} skipped, its logits do not fit", flush=True)
            continue
        setup = Setup(
            name, ranks, pairs, options.dim, options.scale, options.seconds, options.device
        )
        floor = FLOOR_PRODUCTS * 2 * pairs * pairs * ranks * options.dim / gflops / 1e6
        row = {
            "provider": name,
            "ranks": ranks,
            "pairs_per_rank": pairs,
            "dim": options.dim,
            **measure(setup),
            "floor_ms": floor,
            **_environment(),
        }
        del row["rank"]
        rows.append(row)
        _print(row, rows)
    return rows


def _fits(name: str, ranks: int, pairs: int) -> bool:
    if not PROVIDERS[name].is_global:
        return True
    needed = ranks * (ranks * pairs) ** 2 * GLOBAL_BYTES_PER_LOGIT
    return needed < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2


def _print(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    provider = PROVIDERS[row["provider"]]
    print(
        f"{row['ranks']} x {row['pairs_per_rank']:5d}  {provider.name:20s}"
        f"{row['ms_median']:9.1f} ms [{row['ms_p20']:.1f}, {row['ms_p80']:.1f}]"
        f"{row['cpu_ms']:9.1f} cpu ms {row['peak_mib']:9.1f} MiB {row['wire_mb']:8.2f} MB"
        f" {row['products']:5.2f} products"
        f"  error {row['gradient_error']:.1e} x {row['gradient_scale']:.4f}"
        f"  {row['cpu_ms'] / row['floor_ms']:.2f} x floor",
        flush=True,
    )
    base = next((r for r in rows if r["provider"] == REFERENCES[provider.kind]), None)
    if not provider.is_ours or base is None:
        return
    if row["gradient_error"] > MAX_ERROR or abs(row["gradient_scale"] - 1) > MAX_SCALE_ERROR:
        raise SystemExit(f"{provider.name}: gradients are wrong, no speed-up is printed")
    ratios = [f"{row[k] / base[k]:.3f} {k}" for k in ("ms_median", "cpu_ms", "peak_mib", "wire_mb")]
    print(f"{'':31s}of {base['provider']}: " + ", ".join(ratios), flush=True)


def _product_gflops(dim: int, size: int = 1024) -> float:
    """Return the speed of a bare product on one thread, the best of several, by processor time."""
    torch.set_num_threads(1)
    a, b, out = torch.randn(size, dim), torch.randn(dim, size), torch.empty(size, size)
    seconds = []
    for _ in range(20):
        start = time.process_time()
        torch.mm(a, b, out=out)
        seconds.append(time.process_time() - start)
    return 2 * size * size * dim / min(seconds) / 1e9


def _environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "open_clip": version("open_clip_torch"),
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
        "date": date.today().isoformat(),
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: _short(v) for k, v in row.items()})


def _short(value: Any) -> Any:
    return f"{value:.5g}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
