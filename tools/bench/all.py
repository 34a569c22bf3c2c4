"""Every benchmark, one after another; ends with one line each.

    python tools/bench/all.py --quick [--only losses link]

``--quick`` keeps sizes small and writes no results. The exit status is 1 when any of them failed;
one that this machine cannot run (root and iproute2 for the thin link) is named as left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Bench:
    """A script, what makes it quick (OUT: a file to throw away), and what it needs."""

    name: str
    quick: tuple[str, ...] = ("--quick",)
    needs_root: bool = False


BENCHES = (
    Bench("losses", ("--ranks", "2", "--pairs", "256", "--seconds", "3", "--output", "OUT")),
    Bench("fastclip", ("--samples", "100000", "--batch", "128", "--steps", "2", "--output", "OUT")),
    Bench("data", ("--repeats", "1", "--parts", "reduced_decode", "--output", "OUT")),
    Bench("training"),
    Bench("link", needs_root=True),
    Bench("checkpoint"),
    Bench("retrieval", ("--images", "500")),
    Bench("plan_headline", ("--output", "OUT")),
    Bench("scaling", ("--output", "OUT")),
)


def missing(bench: Bench) -> str | None:
    """Why this machine cannot run a benchmark."""
    if not bench.needs_root:
        return None
    if os.geteuid() != 0:
        return "needs root"
    return None if shutil.which("tc") else "needs iproute2"


def run(bench: Bench, *, quick: bool) -> str:
    """Run one; how it ended, in words."""
    if (reason := missing(bench)) is not None:
        return f"left out: {reason}"
    out = str(Path(tempfile.gettempdir()) / f"bench-{bench.name}-{os.getpid()}")
    arguments = tuple(out if word == "OUT" else word for word in bench.quick) if quick else ()
    print(f"== {bench.name} {' '.join(arguments)}", flush=True)
    begin = time.perf_counter()
    ended = subprocess.run([sys.executable, str(FOLDER / f"{bench.name}.py"), *arguments])
    seconds = time.perf_counter() - begin
    Path(out).unlink(missing_ok=True)
    return f"{'ok' if ended.returncode == 0 else f'FAILED ({ended.returncode})'} in {seconds:.0f} s"


def main() -> int:
    names = [bench.name for bench in BENCHES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    ended = {b.name: run(b, quick=options.quick) for b in BENCHES if b.name in options.only}
    print("\n| benchmark | |\n|---|---|")
    for name, words in ended.items():
        print(f"| {name} | {words} |")
    return int(any(words.startswith("FAILED") for words in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
