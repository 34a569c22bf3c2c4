"""How runs are: from the run folders, and one question to Slurm for all of them.

The job script writes starts and ends into the run folder, so accounting is not needed. Slurm is
asked about jobs that have not ended: squeue once for all, then, for a job that squeue no longer
knows, sacct and scontrol. Without any answer a run that never ended is ``lost``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_ds.launch.failure import explain
from disco_ds.launch.folder import FINAL, Event, RunFolder

ASK_SECONDS = 30
# Slurm's word -> ours, for a job whose script could not say its end itself.
ENDED = {
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
    "TIMEOUT": "failed",
    "DEADLINE": "failed",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "BOOT_FAIL": "failed",
    "PREEMPTED": "failed",
}
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUE_FED")


@dataclass(frozen=True)
class RunState:
    """One row of `status`."""

    run: RunFolder
    state: str
    """pending, running, requeued, done, failed, stopped, cancelled or lost."""
    job: str
    attempt: int
    """Counted from 1; 0 before the first."""
    node: str = ""
    step: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    log: Path | None = None
    note: str = ""
    """Why it waits, or why it failed."""

    @property
    def is_final(self) -> bool:
        """Nothing more happens by itself."""
        return self.state in (*FINAL, "lost")


def look_up(runs: Sequence[RunFolder]) -> list[RunState]:
    """The states of runs, in their order."""
    histories = [run.events() for run in runs]
    open_jobs = {
        job for run, events in zip(runs, histories, strict=True) if (job := _open_job(run, events))
    }
    known = ask_slurm({job for job in open_jobs if not job.startswith("local-")})
    return [_state(run, events, known) for run, events in zip(runs, histories, strict=True)]


def _open_job(run: RunFolder, events: list[Event]) -> str | None:
    return run.job() if run.is_active() else None


def _state(run: RunFolder, events: list[Event], known: dict[str, tuple[str, str]]) -> RunState:
    started = [event for event in events if event.name == "started"]
    attempt = run.last_attempt()
    state, note = _word(run, events, known)
    if state in ("failed", "lost") and attempt is not None and "limit is" not in note:
        slurm = f"{note}; " if note.startswith("Slurm") else ""
        note = slurm + explain(attempt).summary()
    elif state in ("failed", "lost") and (said := run.job_log()):
        note = f"{note}; {said[-1]}"
    metrics = last_metrics(run)
    return RunState(
        run=run,
        state=state,
        job=run.job() or "",
        attempt=len(started),
        node=started[-1].reason if started and state not in ("pending",) else "",
        step=metrics.get("step"),
        loss=metrics.get("loss"),
        samples_per_second=metrics.get("samples_per_second"),
        log=attempt / "rank-0.log" if attempt is not None else None,
        note=note,
    )


def _word(
    run: RunFolder, events: list[Event], known: dict[str, tuple[str, str]]
) -> tuple[str, str]:
    waits = run.waiting_job() is not None
    if not waits and not events:
        return "lost", "never submitted"
    last = "" if waits else events[-1].name
    if last in FINAL:
        return last, events[-1].reason
    job = run.job() or ""
    if job.startswith("local-"):
        return _local_word(last, job)
    slurm, reason = known.get(job, ("", ""))
    if slurm in WAITING:
        return ("pending" if waits else "requeued"), reason
    if slurm in ENDED:
        return ENDED[slurm], f"Slurm: {slurm}{f', {reason}' if reason else ''}"
    if slurm:
        return {"": "pending", "requeued": "requeued"}.get(last, "running"), ""
    return "lost", "Slurm does not know the job"


def _local_word(last: str, job: str) -> tuple[str, str]:
    if not is_local_alive(job):
        return "lost", "its process is gone"
    return {"": "pending", "requeued": "requeued"}.get(last, "running"), ""


def is_local_alive(job: str) -> bool:
    """Whether the process of a local job runs; another one with its number does not count."""
    for pause in (0.3, 0):
        try:
            command = Path("/proc", job.removeprefix("local-"), "cmdline").read_bytes()
        except OSError:
            return False
        if b"script.sh" in command:
            return True
        # A process that was just started may still bear its parent's name.
        time.sleep(pause)
    return False


def ask_slurm(jobs: set[str]) -> dict[str, tuple[str, str]]:
    """State and reason of jobs, in Slurm's words; jobs that it does not know are absent."""
    if not jobs or shutil.which("squeue") is None:
        return {}
    # %i is ID or ARRAY_INDEX; -r has one line for each member of an array.
    lines = _ask("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-u", _user())
    known = {}
    for line in lines:
        job, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if job in jobs:
            known[job] = (state, "" if reason == "None" else reason)
    for job in sorted(jobs - known.keys()):
        if found := _from_sacct(job) or _from_scontrol(job):
            known[job] = found
    return known


def _user() -> str:
    import getpass

    return getpass.getuser()


def _from_sacct(job: str) -> tuple[str, str] | None:
    if shutil.which("sacct") is None:
        return None
    lines = _ask("sacct", "-n", "-P", "-X", "-o", "State,Reason", "-j", job)
    return parse_sacct(lines)


def parse_sacct(lines: Sequence[str]) -> tuple[str, str] | None:
    """The last line of ``sacct -n -P -X -o State,Reason``; None when there is none."""
    filled = [line for line in lines if "|" in line]
    if not filled:
        return None
    state, _, reason = filled[-1].strip().partition("|")
    # "CANCELLED by 1000"
    return state.split()[0].rstrip("+"), "" if reason in ("None", "") else reason


def _from_scontrol(job: str) -> tuple[str, str] | None:
    text = " ".join(_ask("scontrol", "-o", "show", "job", job))
    state = re.search(r"\bJobState=(\w+)", text)
    reason = re.search(r"\bReason=(\S+)", text)
    if state is None:
        return None
    return state[1], reason[1] if reason and reason[1] != "None" else ""


def _ask(*command: str) -> list[str]:
    """Lines that a command prints; none when it fails (no accounting, unknown job)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def last_metrics(run: RunFolder) -> dict[str, Any]:
    """The newest logged step, without reading the whole file."""
    try:
        with (run.path / "metrics.jsonl").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65536))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and "loss" in content:
            return content
    return {}


def table(states: Sequence[RunState]) -> str:
    """States as text, one run a line; the reason of a failure below it."""
    header = ("run", "state", "attempt", "job", "node", "step", "loss", "samples/s", "log")
    rows = [header, *(_cells(state) for state in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row, state in zip(rows, [None, *states], strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
        if state is not None and state.note:
            lines.append(f"    {state.note}")
    return "\n".join(lines)


def _cells(state: RunState) -> tuple[str, ...]:
    def number(value: object, form: str) -> str:
        """A dash for what is missing, or is no number in a damaged file."""
        if not isinstance(value, int | float):
            return "-"
        return format(int(value) if form == "d" else value, form)

    return (
        str(state.run.path),
        state.state,
        str(state.attempt),
        state.job,
        state.node or "-",
        number(state.step, "d"),
        number(state.loss, ".4f"),
        number(state.samples_per_second, ".1f"),
        str(state.log or "-"),
    )
