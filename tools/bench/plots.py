"""Draw what is under ``results/``: losses, link, scaling, and loss curves of training runs.

    pip install matplotlib && python tools/bench/plots.py

Each benchmark draws its own plot when it keeps its results; this draws all of them anew.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, str]
Curves = Mapping[str, Sequence[Sequence[float]]]
"""By variant: the losses of each seed (or round), step by step."""


def read(name: str) -> tuple[str, list[Row]]:
    """The note (without ``#``, empty if there is none) and the rows of ``results/NAME.csv``."""
    lines = (RESULTS / f"{name}.csv").read_text().splitlines()
    note = lines.pop(0).removeprefix("# ") if lines[0].startswith("#") else ""
    return note, list(csv.DictReader(lines))


def losses() -> None:
    """Time and memory of a loss step against the global batch, two ranks."""
    _, rows = read("losses")
    rows = [row for row in rows if row["ranks"] == "2"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    columns = {"ms_median": "time of one step (ms)", "peak_mib": "peak memory of a rank (MiB)"}
    for axis, (column, label) in zip(axes, columns.items(), strict=True):
        axis.set_prop_cycle(color=plt.get_cmap("tab20").colors)
        _lines(axis, rows, "provider", lambda row: 2 * int(row["pairs_per_rank"]), column)
        axis.set(yscale="log", xlabel="global batch", ylabel=label)
    axes[1].legend(fontsize=7)
    first = rows[0]
    figure.suptitle(
        f"2 ranks, d = {first['dim']}, fp32, CPU ({first['machine']}), torch {first['torch']}, "
        f"open_clip {first['open_clip']}, {first['date']}",
        fontsize=9,
    )
    _save(figure, "losses")


def link() -> None:
    """Time of loss steps and of training steps over the thin link, of open_clip's."""
    note, rows = read("link")
    panels = sorted({(row["experiment"], int(row["ranks"])) for row in rows})
    figure, axes = plt.subplots(1, len(panels), figsize=(15, 4.2), layout="constrained")
    for axis, (experiment, ranks) in zip(axes, panels, strict=True):
        own = [row for row in rows if (row["experiment"], int(row["ranks"])) == (experiment, ranks)]
        _lines(axis, own, "variant", lambda row: int(row["pairs_per_rank"]), "ratio")
        axis.axhline(0.5, color="grey", linewidth=0.6)
        axis.set(title=f"{experiment} step, {ranks} ranks", xlabel="pairs per rank", ylim=(0, 1.6))
    axes[0].set_ylabel("time of open_clip's (median of rounds)")
    axes[0].legend(fontsize=7)
    axes[-1].legend(fontsize=7)
    figure.suptitle(note, fontsize=9)
    _save(figure, "link")


def scaling() -> None:
    """The loss on paper: time, received bytes and memory of open_clip's, against the GPUs."""
    note, rows = read("scaling")
    rows = [row for row in rows if row["global_batch"] == str(4096 * int(row["gpus"]))]
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    columns = {
        "loss_ms": "loss, ms",
        "received_mb": "received by a rank for the loss, MB",
        "loss_memory_mb": "memory of a rank for the loss, MB",
    }
    for axis, (column, label) in zip(axes, columns.items(), strict=True):
        _lines(axis, rows, "loss", lambda row: int(row["gpus"]), column)
        axis.set(yscale="log", xlabel="GPUs, 4096 pairs each", ylabel=label)
    axes[0].legend(fontsize=8)
    figure.suptitle(note, fontsize=9)
    _save(figure, "scaling")


def training() -> None:
    """Loss curves beside open_clip_train's, a seed per round."""
    _overlay("training", base="open_clip", window=10)


def compression() -> None:
    """Loss curves with parameter gradients in 16 bits."""
    _overlay("compression", base="fp32", window=1)


PLOTS: dict[str, Callable[[], None]] = {
    "losses": losses,
    "link": link,
    "scaling": scaling,
    "training": training,
    "compression": compression,
}


def redraw(path: Path) -> None:
    """After a CSV was written; one that is not kept under ``results/`` is not drawn."""
    if path.parent == RESULTS:
        PLOTS[path.stem]()


def keep_curves(name: str, curves: Curves) -> None:
    """Write ``results/NAME_losses.json`` and draw it."""
    (RESULTS / f"{name}_losses.json").write_text(json.dumps(curves) + "\n")
    PLOTS[name]()


def _overlay(name: str, *, base: str, window: int) -> None:
    """All curves, a colour per variant; and how far each is from the base at the same seed."""
    note, _ = read(name)
    curves: Curves = json.loads((RESULTS / f"{name}_losses.json").read_text())
    figure, (loss, difference) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, (variant, own) in enumerate(curves.items()):
        for seed, (values, other) in enumerate(zip(own, curves[base], strict=True)):
            label = "" if seed else variant
            style: dict[str, Any] = {"color": f"C{number}", "linewidth": 0.8, "label": label}
            loss.plot(values, **style)
            less = [a - b for a, b in zip(values, other, strict=True)]
            difference.plot(_smooth(less, window), **style)
    mean = f", mean of {window} steps" if window > 1 else ""
    loss.set(xlabel="step", ylabel="loss")
    difference.set(xlabel="step", ylabel=f"less {base}'s, same seed{mean}")
    difference.legend()
    figure.suptitle(note, fontsize=8)
    _save(figure, name)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Means of ``window`` values, ending at each."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _lines(axis: Any, rows: Sequence[Row], by: str, x: Callable[[Row], int], column: str) -> None:
    """A line for each value of the column ``by``; ours whole, others broken."""
    for name in dict.fromkeys(row[by] for row in rows):
        own = [row for row in rows if row[by] == name]
        style = "o-" if name.startswith("ours") else "s--"
        values = [float(row[column]) for row in own]
        axis.plot([x(row) for row in own], values, style, label=name, ms=4)
    axis.set_xscale("log", base=2)
    axis.grid(visible=True, which="both", alpha=0.25)


def _save(figure: Any, name: str) -> None:
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    for draw in PLOTS.values():
        draw()
