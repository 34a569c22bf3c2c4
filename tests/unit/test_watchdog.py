"""Where a rank is, and that it ends when it is stuck."""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from disco_ds.watchdog import STUCK, Watchdog


def test_place_in_words() -> None:
    watchdog = Watchdog(3, 60)
    assert watchdog.place == "rank 3 in start-up"
    watchdog.enter("waiting for data", steps_taken=4)
    with watchdog.phase("evaluation"):
        assert watchdog.place == "rank 3 in step 5, evaluation"
    assert watchdog.place == "rank 3 in step 5, waiting for data"
    with pytest.raises(RuntimeError), watchdog.phase("writing a checkpoint"):
        raise RuntimeError
    assert watchdog.place == "rank 3 in step 5, writing a checkpoint"


def _stuck(log: str, ticks: int) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    watchdog = Watchdog(1, 0.5).start()
    for _ in range(ticks):  # longer than the time-out altogether
        time.sleep(0.1)
        watchdog.tick()
    watchdog.enter("optimizer step", steps_taken=0)
    time.sleep(60)


@pytest.mark.parametrize("ticks", [0, 15])
def test_no_progress_ends_the_process(tmp_path: Path, ticks: int) -> None:
    log = tmp_path / "log"
    process = get_context("forkserver").Process(target=_stuck, args=(str(log), ticks))
    process.start()
    process.join(30)
    assert process.exitcode == STUCK
    first, last = log.read_text().splitlines()
    assert first.startswith("error: rank 1 in step 1, optimizer step: no progress for")
    assert "still waits (--timeout_seconds 0.5)" in first and "gives up" in last


def test_stopped_it_ends_nothing() -> None:
    watchdog = Watchdog(0, 0.2).start()
    watchdog.stop()
    time.sleep(0.5)
