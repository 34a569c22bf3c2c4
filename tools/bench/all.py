"""Every benchmark, one after another; ends with one table.

    python tools/bench/all.py --quick [--only losses link]

``--quick`` keeps sizes small and writes no results; without it every benchmark's row in
``results/summary.md`` is written as it ends, and the rows of others stay. The exit status is 1
when any of them failed; one that this machine cannot run (root and iproute2 for the thin link, npm
for the emoji) is named as left out. What a benchmark found in short is its last line.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SUMMARY = FOLDER / "results" / "summary.md"
HEAD = "| benchmark | when, with | ended | in short |\n|---|---|---|---|\n"


@dataclass(frozen=True)
class Bench:
    """A script, what makes it quick (OUT: a file to throw away), and what it needs."""

    name: str
    quick: tuple[str, ...] = ("--quick",)
    needs_root: bool = False
    needs_program: str | None = None


BENCHES = (
    Bench("losses", ("--ranks", "2", "--pairs", "256", "--seconds", "3", "--output", "OUT")),
    Bench("fastclip", ("--samples", "100000", "--batch", "128", "--steps", "2", "--output", "OUT")),
    Bench("data", ("--quick", "--output", "OUT")),
    Bench("step"),
    Bench("training"),
    Bench("compression"),
    Bench("link", needs_root=True),
    Bench("checkpoint"),
    Bench("retrieval", ("--images", "500")),
    Bench("plan_headline", ("--output", "OUT")),
    Bench("scaling", ("--output", "OUT")),
    Bench("learning", needs_program="npm"),
)
IN_SHORT = "in short: "


@dataclass(frozen=True)
class Ended:
    """How a benchmark ended, and what it found."""

    words: str
    in_short: str = ""


def missing(bench: Bench) -> str | None:
    """Why this machine cannot run a benchmark."""
    program = bench.needs_program
    if program is not None and shutil.which(program) is None:
        return f"needs {program}"
    if not bench.needs_root:
        return None
    if os.geteuid() != 0:
        return "needs root"
    return None if shutil.which("tc") else "needs iproute2"


def run(bench: Bench, *, quick: bool) -> Ended:
    """Run one, showing what it says."""
    if (reason := missing(bench)) is not None:
        return Ended(f"left out: {reason}")
    out = Path(tempfile.gettempdir()) / f"bench-{bench.name}-{os.getpid()}"
    arguments = [str(out) if word == "OUT" else word for word in bench.quick] if quick else []
    print(f"== {bench.name} {' '.join(arguments)}", flush=True)
    begin, in_short = time.perf_counter(), ""
    command = [sys.executable, str(FOLDER / f"{bench.name}.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(IN_SHORT):
                in_short = line.removeprefix(IN_SHORT).strip()
    seconds = time.perf_counter() - begin
    out.unlink(missing_ok=True)
    status = process.returncode
    return Ended(f"{'ok' if status == 0 else f'FAILED ({status})'} in {seconds:.0f} s", in_short)


def row_of(name: str, ended: Ended) -> str:
    """A row of the table."""
    when = f"{datetime.date.today()}, torch {version('torch')}, {os.cpu_count()} cores"
    return f"| {name} | {when} | {ended.words} | {ended.in_short} |"


def keep(name: str, row: str, path: Path = SUMMARY) -> None:
    """Put a benchmark's row in the place of its last one."""
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    rows[name] = row
    ordered = [rows[bench.name] for bench in BENCHES if bench.name in rows]
    path.write_text(HEAD + "\n".join(ordered) + "\n")


def main() -> int:
    names = [bench.name for bench in BENCHES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    rows, has_failed = [], False
    for bench in BENCHES:
        if bench.name not in options.only:
            continue
        ended = run(bench, quick=options.quick)
        has_failed |= ended.words.startswith("FAILED")
        rows.append(row_of(bench.name, ended))
        if not options.quick:
            keep(bench.name, rows[-1])
    print(f"\n{HEAD}" + "\n".join(rows))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
