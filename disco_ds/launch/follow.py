"""Showing the log of a rank while it grows, from one attempt to the next."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from disco_ds.launch.job import Job

POLL_SECONDS = 0.5


def show(job: Job, rank: int, output: TextIO) -> None:
    """Print the log of the newest attempt.

    Raises:
        ValueError: there is none, naming the ranks that have one, or why the run has not started.
    """
    log = job.log_file(rank)
    if log is None or not log.exists():
        raise ValueError(_why_no_log(job, rank))
    output.write(log.read_text(errors="replace"))


def _why_no_log(job: Job, rank: int) -> str:
    attempt = job.run.last_attempt()
    if attempt is None:
        state = job.look_up()
        why = f" ({state.note})" if state.note else ""
        return f"{job.run.path}: {state.state}, no output yet{why}"
    ranks = sorted(int(path.stem.removeprefix("rank-")) for path in attempt.glob("rank-*.log"))
    return f"{job.run.path}: no log of rank {rank}; there are ranks {ranks}"


def follow(job: Job, rank: int, output: TextIO, *, from_start: bool = True) -> None:
    """Print the log of a rank as it grows, until the run ends; later attempts follow on."""
    log: Path | None = None
    position = 0
    if not from_start and (log := job.log_file(rank)) is not None and log.exists():
        position = log.stat().st_size
    asked = 0.0
    while True:
        is_final = False
        # The run folder answers most questions; Slurm is asked rarely.
        if not job.run.is_active():
            is_final = True
        elif time.monotonic() - asked > 10:
            asked = time.monotonic()
            state = job.look_up()
            is_final = state.is_final
            if log is None and state.state == "pending":
                output.write(f"job {state.job} waits{f': {state.note}' if state.note else ''}\n")
        newest = job.log_file(rank)
        if newest is not None and newest != log:
            if log is not None:
                position = _copy(log, position, output)
                output.write(f"--- attempt {newest.parent.name} ---\n")
            log, position = newest, 0
        if log is not None:
            position = _copy(log, position, output)
        output.flush()
        if is_final:
            return
        time.sleep(POLL_SECONDS)


def _copy(log: Path, position: int, output: TextIO) -> int:
    try:
        with log.open("rb") as file:
            file.seek(position)
            content = file.read()
    except OSError:
        return position
    output.write(content.decode(errors="replace"))
    return position + len(content)
