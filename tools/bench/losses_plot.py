"""Draw ``results/losses.csv``: time and memory against the global batch, both axes logarithmic.

    pip install matplotlib && python tools/bench/losses_plot.py

Matplotlib is no dependency of the project; this script alone uses it.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
RANKS = "2"
COLUMNS = {"ms_median": "time of one step (ms)", "peak_mib": "peak memory of a rank (MiB)"}


def main() -> None:
    with (RESULTS / "losses.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["ranks"] == RANKS]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, (column, label) in zip(axes, COLUMNS.items(), strict=True):
        _panel(axis, rows, column, label)
    axes[1].legend(fontsize=7)
    figure.suptitle(
        f"{RANKS} ranks, d = {rows[0]['dim']}, fp32, CPU ({rows[0]['machine']}), "
        f"torch {rows[0]['torch']}, open_clip {rows[0]['open_clip']}, {rows[0]['date']}",
        fontsize=9,
    )
    figure.savefig(RESULTS / "losses.png", dpi=110)


def _panel(axis: Any, rows: list[dict[str, str]], column: str, label: str) -> None:
    axis.set_prop_cycle(color=plt.get_cmap("tab20").colors)
    for provider in dict.fromkeys(row["provider"] for row in rows):
        own = [row for row in rows if row["provider"] == provider]
        batches = [int(row["ranks"]) * int(row["pairs_per_rank"]) for row in own]
        style = "o-" if provider.startswith("ours") else "s--"
        axis.plot(batches, [float(row[column]) for row in own], style, label=provider, ms=4)
    axis.set(xscale="log", yscale="log", xlabel="global batch", ylabel=label)
    axis.set_xscale("log", base=2)
    axis.grid(True, which="both", alpha=0.25)


if __name__ == "__main__":
    main()
