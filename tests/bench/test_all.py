"""The benchmarks as a whole: every one runs small, failures are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import all as all_benches
import pytest

ALL = Path(all_benches.__file__)


def test_a_benchmark_that_fails_is_told() -> None:
    ended = all_benches.run(all_benches.Bench("no_such_benchmark"), quick=True)
    assert ended.words.startswith("FAILED (2)")
    assert "| FAILED (2)" in all_benches.row_of("no_such", ended)


def test_the_summary_keeps_the_rows_of_other_benchmarks(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    for name, found in (("data", "1"), ("losses", "2"), ("data", "3")):
        row = all_benches.row_of(name, all_benches.Ended("ok in 1 s", found))
        all_benches.keep(name, row, path)
    head, line, *rows = path.read_text().splitlines()
    assert [(row.split(" | ")[0], row[-4:]) for row in rows] == [
        ("| losses", " 2 |"),
        ("| data", " 3 |"),
    ]
    assert head.startswith("| benchmark |") and set(line) <= set("|-")


def test_every_script_is_a_benchmark_or_a_part_of_one() -> None:
    scripts = {path.stem for path in ALL.parent.glob("*.py") if "def main(" in path.read_text()}
    helpers = {"all", "open_clip_main"}
    assert scripts - helpers == {bench.name for bench in all_benches.BENCHES}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_run_small() -> None:
    command = [sys.executable, str(ALL), "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    table = ended.stdout[ended.stdout.rindex("| benchmark |") :]
    for bench in all_benches.BENCHES:
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {bench.name} |")]
        _, _, _, how, in_short, _ = (cell.strip() for cell in row.split("|"))
        assert how.startswith("left out") or (how.startswith("ok") and in_short), row
