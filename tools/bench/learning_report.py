"""Mean and deviation over seeds, as CSV and as a table with the paper's numbers beside."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from learning_rows import Row

BATCHES = (16, 32, 64, 256)
BOTH = "both"
# FastCLIP (arXiv 2407.01445), medium setting, mean of ImageNet and variants, percent; OpenCLIP and
# v3 by nodes (the batch grows with them), read off a figure, on one and on eight nodes.
PAPER = {
    "open_clip, default": "14.2 (1 node), 16.0 (8)",
    "SogCLR": "16.9",
    "iSogCLR": "17.1",
    "FastCLIP-v1": "18.9",
    "FastCLIP-v2": "18.5",
    "FastCLIP-v3": "18.4 (1 node), 19.2 (8)",
}
PAPER_NODES = (1, 2, 4, 8)
PAPER_CURVES = {
    "OpenCLIP": ((14.18, 14.72, 15.22, 15.99), (0.16, 0.29, 0.29, 0.30)),
    "FastCLIP-v3": ((18.41, 19.08, 19.21, 19.21), (0.34, 0.22, 0.25, 0.22)),
}


# What a step from one row to the next changes.
STEPS = (
    ("temperature learns at v3's rate", "open_clip, default", "open_clip, tau lr of v3"),
    ("tuned constant temperature", "open_clip, tau lr of v3", "InfoNCE, best constant tau"),
    ("positive out of the sum", "InfoNCE, best constant tau", "GCL, gamma 1 (no memory)"),
    ("memory, tau constant", "GCL, gamma 1 (no memory)", "FastCLIP-v1"),
    ("memory, tau of v3", "FastCLIP-v3, gamma 1 (no memory)", "FastCLIP-v3"),
    ("tau learnt with rho", "FastCLIP-v1", "FastCLIP-v3"),
    ("all together", "open_clip, default", "FastCLIP-v3"),
    ("against a tuned constant", "InfoNCE, best constant tau", "FastCLIP-v3"),
)


@dataclass(frozen=True)
class Cell:
    """One number of the table; percent."""

    form: str
    row: str
    batch: int
    artist: str
    concepts: str
    """seen: the right one of the trained names; new: of those never trained."""
    mean: float
    sd: float | None
    """Over seeds; None for a single one."""
    seeds: int
    tau: float
    """Mean temperature at the end."""


def aggregate(results: Iterable[Mapping[str, Any]], tests: Sequence[str]) -> list[Cell]:
    """Cells from the results of runs (``form``, ``name``, ``batch``, ``seen``, ``new``, ``tau``).

    The artist "both" is the mean over ``tests``, taken within a seed.
    """
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for result in results:
        place = (result["form"], result["name"], result["batch"])
        groups.setdefault(place, []).append(result)
    cells = []
    for (form, row, batch), runs in groups.items():
        tau = mean(run["tau"] for run in runs)
        for concepts in ("seen", "new"):
            values = {artist: [run[concepts][artist] for run in runs] for artist in runs[0]["seen"]}
            values[BOTH] = [mean(run[concepts][artist] for artist in tests) for run in runs]
            for artist, found in values.items():
                sd = round(stdev(found), 3) if len(found) > 1 else None
                cells.append(
                    Cell(
                        form,
                        row,
                        batch,
                        artist,
                        concepts,
                        round(mean(found), 3),
                        sd,
                        len(found),
                        round(tau, 4),
                    )
                )
    return cells


def markdown(cells: Iterable[Cell], form: str, rows: Sequence[Row], artist: str = BOTH) -> str:
    """The table of one form: trained names, rows in order, an empty cell where nothing ran.

    The paper's numbers stand beside those of both test artists.
    """
    found = {
        (cell.row, cell.batch): _shown(cell)
        for cell in cells
        if (cell.form, cell.artist, cell.concepts) == (form, artist, "seen")
    }
    paper = PAPER if artist == BOTH else None
    heads = ["", *(f"B = {batch}" for batch in BATCHES), *(["paper"] if paper else [])]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        shown = [found.get((row.name, batch), "") for batch in BATCHES]
        if any(shown):
            beside = [paper.get(row.name, "")] if paper else []
            lines.append("| " + " | ".join([row.name, *shown, *beside]) + " |")
    return "\n".join(lines)


def in_short(cells: Iterable[Cell], form: str) -> str:
    """Where the two ends of the table stand at batch 64, in one line."""
    found = {
        cell.row: _shown(cell)
        for cell in cells
        if (cell.form, cell.batch, cell.artist, cell.concepts) == (form, 64, BOTH, "seen")
    }
    names = ("open_clip, default", "FastCLIP-v3")
    shown = ", ".join(f"{name} {found.get(name, 'not run')}" for name in names)
    return f"in short: R@1 on artists never seen, {form}, batch 64: {shown}"


def differences(results: Iterable[Mapping[str, Any]], form: str, tests: Sequence[str]) -> str:
    """Points gained from row to row on ``tests``, paired by seed, as a table."""
    values: dict[tuple[str, int], dict[int, float]] = {}
    for result in results:
        if result["form"] == form:
            found = values.setdefault((result["name"], result["batch"]), {})
            found[result["seed"]] = mean(result["seen"][artist] for artist in tests)
    lines = [
        "| " + " | ".join(["what changes", *(f"B = {batch}" for batch in BATCHES)]) + " |",
        "|---" * (len(BATCHES) + 1) + "|",
    ]
    for what, before, after in STEPS:
        shown = []
        for batch in BATCHES:
            old, new = values.get((before, batch), {}), values.get((after, batch), {})
            gains = [new[seed] - old[seed] for seed in sorted(old.keys() & new.keys())]
            shown.append(_gain(gains))
        lines.append(f"| {what}: {before} → {after} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _gain(gains: Sequence[float]) -> str:
    if not gains:
        return ""
    if len(gains) == 1:
        return f"{gains[0]:+.1f} (1 seed)"
    few = f" ({len(gains)})" if len(gains) < 5 else ""
    return f"{mean(gains):+.1f} ± {stdev(gains):.1f}{few}"


def _shown(cell: Cell) -> str:
    if cell.sd is None:
        return f"{cell.mean:.1f} (1 seed)"
    return f"{cell.mean:.1f} ± {cell.sd:.1f}" + (f" ({cell.seeds})" if cell.seeds < 5 else "")


def write_csv(cells: Sequence[Cell], path: Path, note: str) -> None:
    """Every cell, under a comment of one line."""
    with path.open("w", newline="") as file:
        file.write(f"# {note}\n")
        writer = csv.DictWriter(file, fieldnames=list(asdict(cells[0])))
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in cells)


def read_csv(path: Path) -> list[Cell]:
    """The cells of :func:`write_csv`."""
    with path.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            Cell(
                form=row["form"],
                row=row["row"],
                batch=int(row["batch"]),
                artist=row["artist"],
                concepts=row["concepts"],
                mean=float(row["mean"]),
                sd=float(row["sd"]) if row["sd"] else None,
                seeds=int(row["seeds"]),
                tau=float(row["tau"]),
            )
            for row in rows
        ]
