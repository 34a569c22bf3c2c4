"""Contrastive losses side by side: time, memory, bytes, products and gradient error.

    python tools/bench/losses.py                      # 2 ranks up to 8192 pairs each, 4 ranks
    python tools/bench/losses.py --ranks 2 --pairs 512 1024 --providers open_clip ours

Ranks have one thread each. Times are taken in turn, all losses in every round: on the clock (median
and 20/80 % quantiles) and of rank 0's processor; ratios are medians over rounds. Memory is the peak
of resident memory over what was resident before the step (features included in that), on the worst
rank, in processes that did nothing else. A speed-up is printed only for a loss whose gradients
match float64. The floor is the time of the fewest products any exact method needs, at the speed of
a bare ``torch.mm``.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from losses_baselines import PROVIDERS, REFERENCES
from losses_measure import Samples, Setup, measure_costs, measure_times
from plots import redraw

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
            setup = Setup(ranks, pairs, options.dim, options.scale, options.device)
            rows += _compare(setup, options.providers, options.seconds, gflops)
            _write(options.output, rows)
    redraw(options.output)
    print(f"wrote {options.output}")
    own = [r for r in rows if r["provider"] == "ours" and r["ranks"] == rows[-1]["ranks"]]
    print(
        f"in short: {own[-1]['ranks']} x {own[-1]['pairs_per_rank']} pairs: ours takes "
        f"{own[-1]['time_ratio']:.2f} of the time of {REFERENCES['infonce']}'s"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=(2, 4))
    parser.add_argument("--pairs", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--pairs_of_4", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--scale", type=float, default=14.3)
    parser.add_argument("--seconds", type=float, default=30.0, help="to spend on timing a size")
    parser.add_argument("--providers", nargs="+", default=list(PROVIDERS), choices=PROVIDERS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, default=RESULTS / "losses.csv")
    return parser.parse_args()


def _compare(
    setup: Setup, providers: list[str], seconds: float, gflops: float
) -> list[dict[str, Any]]:
    """Measure all providers at one size, print them and return one row for each."""
    names = [name for name in providers if _fits(name, setup.ranks, setup.pairs)]
    product = 2 * setup.pairs * setup.pairs * setup.ranks * setup.dim / gflops / 1e6
    # A step is about six products, and half as much again for all the rest.
    rounds = int(min(30, max(3, seconds * 1e3 / (len(names) * 9 * product))))
    costs = {name: measure_costs(name, setup) for name in names}
    times = measure_times(names, setup, rounds)
    rows = []
    for name in names:
        row = {
            "provider": name,
            "ranks": setup.ranks,
            "pairs_per_rank": setup.pairs,
            "dim": setup.dim,
            **_summary(name, times),
            **costs[name],
            "floor_ms": FLOOR_PRODUCTS * product,
            **_environment(),
        }
        rows.append(row)
        _print(row, costs.get(REFERENCES[PROVIDERS[name].kind]))
    return rows


def _summary(name: str, times: list[dict[str, Samples]]) -> dict[str, Any]:
    """Summarise the samples; ratios to the reference are taken round by round."""
    clock = [round_[name].clock_ms for round_ in times]
    cuts = statistics.quantiles(clock, n=5, method="inclusive")
    reference = REFERENCES[PROVIDERS[name].kind]
    pairs = [(round_[name], round_[reference]) for round_ in times if reference in round_]
    return {
        "ms_median": statistics.median(clock),
        "ms_p20": cuts[0],
        "ms_p80": cuts[3],
        "cpu_ms": statistics.median(round_[name].cpu_ms for round_ in times),
        "time_ratio": statistics.median(a.clock_ms / b.clock_ms for a, b in pairs) if pairs else "",
        "cpu_ratio": statistics.median(a.cpu_ms / b.cpu_ms for a, b in pairs) if pairs else "",
        "rounds": len(times),
    }


def _fits(name: str, ranks: int, pairs: int) -> bool:
    if not PROVIDERS[name].is_global:
        return True
    needed = ranks * (ranks * pairs) ** 2 * GLOBAL_BYTES_PER_LOGIT
    return needed < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2


def _print(row: dict[str, Any], base: dict[str, float] | None) -> None:
    provider = PROVIDERS[row["provider"]]
    print(
        f"{row['ranks']} x {row['pairs_per_rank']:5d}  {provider.name:20s}"
        f"{row['ms_median']:9.1f} ms [{row['ms_p20']:.1f}, {row['ms_p80']:.1f}]"
        f"{row['cpu_ms']:9.1f} cpu ms {row['peak_mib']:9.1f} MiB {row['wire_mb']:8.2f} MB"
        f" {row['products']:5.2f} products"
        f"  error {row['gradient_error']:.1e} x {row['gradient_scale']:.4f}"
        f"  cpu {row['cpu_ms'] / row['floor_ms']:.2f} x floor",
        flush=True,
    )
    if not provider.is_ours or base is None:
        return
    if row["gradient_error"] > MAX_ERROR or abs(row["gradient_scale"] - 1) > MAX_SCALE_ERROR:
        raise SystemExit(f"{provider.name}: gradients are wrong, no speed-up is printed")
    print(
        f"{'':31s}of {REFERENCES[provider.kind]}: {row['time_ratio']:.3f} time, "
        f"{row['cpu_ratio']:.3f} cpu, {row['peak_mib'] / base['peak_mib']:.3f} memory, "
        f"{row['wire_mb'] / base['wire_mb']:.3f} bytes",
        flush=True,
    )


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
