"""Result tables: rows as dictionaries, shown as lines and kept as CSV under a note."""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def show(rows: Rows) -> None:
    """Print a line for each."""
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))


def write_csv(path: Path, rows: Rows, note: str) -> None:
    """Keep the rows under a comment of one line: today's date and ``note``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# {datetime.date.today()}, {note}\n")
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def environment() -> str:
    """Version of torch, machine and how busy it is."""
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    return f"torch {version('torch')}, {machine}, load {os.getloadavg()[0]:.1f}"
