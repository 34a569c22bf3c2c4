"""Draw ``results/learning.csv`` as the paper draws its curves: accuracy against the batch.

python tools/bench/learning_plot.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from learning_report import BOTH, PAPER_CURVES, PAPER_NODES, Cell, read_csv

RESULTS = Path(__file__).parent / "results"
STYLES = {
    "open_clip, default": "C0o--",
    "open_clip, tau lr of v3": "C0s:",
    "InfoNCE, best constant tau": "C7^-",
    "GCL, gamma 1 (no memory)": "C2v-",
    "FastCLIP-v1": "C1D-",
    "FastCLIP-v3": "C3o-",
}
TITLES = {"heads": "heads on frozen towers", "scratch": "ResNet from scratch"}


def draw(cells: Sequence[Cell], path: Path) -> None:
    """A panel for each form, and the paper's."""
    forms = [form for form in TITLES if any(cell.form == form for cell in cells)]
    size = (4.2 * (len(forms) + 1), 4.4)
    figure, axes = plt.subplots(1, len(forms) + 1, figsize=size, layout="constrained")
    for axis, form in zip(axes, forms, strict=False):
        _ours(axis, [cell for cell in cells if cell.form == form], TITLES[form])
    _papers(axes[-1])
    figure.savefig(path, dpi=110)


def _ours(axis: Any, cells: Sequence[Cell], title: str) -> None:
    for row, style in STYLES.items():
        own = sorted(
            (
                cell
                for cell in cells
                if (cell.row, cell.artist, cell.concepts) == (row, BOTH, "seen")
            ),
            key=lambda cell: cell.batch,
        )
        if own:
            axis.errorbar(
                [cell.batch for cell in own],
                [cell.mean for cell in own],
                [cell.sd or 0.0 for cell in own],
                fmt=style,
                label=row,
                ms=4,
                capsize=2,
            )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="batch (equal samples)", ylabel="R@1 on two unseen artists (%)", title=title)
    axis.grid(True, alpha=0.25)
    axis.legend(fontsize=7)


def _papers(axis: Any) -> None:
    for (name, (values, errors)), style in zip(
        PAPER_CURVES.items(), ("C0o--", "C3o-"), strict=True
    ):
        axis.errorbar(PAPER_NODES, values, errors, fmt=style, label=name, ms=4, capsize=2)
    axis.set_xscale("log", base=2)
    axis.set(
        xlabel="nodes (the batch grows with them)",
        ylabel="ImageNet and variants (%)",
        title="FastCLIP's paper, medium setting",
    )
    axis.grid(True, alpha=0.25)
    axis.legend(fontsize=7)


if __name__ == "__main__":
    draw(read_csv(RESULTS / "learning.csv"), RESULTS / "learning.png")
