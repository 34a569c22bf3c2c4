"""The launcher's part of a run folder: what was asked for, what happened.

::

    RUN/launch/
        spec.json       resources, arguments of train.py, working folder, signature
        config.json     the resolved configuration at submission
        script.sh       the job script; `sbatch script.sh` works by hand too
        code/           snapshot of the code with its git revision
        events.tsv      one line per start, re-queue and end
        counters/       how often the run went back into the queue, by cause
        attempts/TIME-JOB-RESTART/  rank-0.log ..., launcher.log, failures of ranks, stop file

Standard library only: read inside jobs, and by `status` for hundreds of runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FINAL = ("done", "failed", "stopped", "cancelled")


@dataclass(frozen=True)
class Event:
    """One line of ``events.tsv``."""

    time: float
    name: str
    """started, requeued, follow_up, or one of :data:`FINAL`."""
    job: str
    status: str = ""
    attempt: str = ""
    reason: str = ""


def _event(line: str) -> Event | None:
    """A line of ``events.tsv``; None where it is cut off or damaged."""
    fields = line.split("\t")
    try:
        return Event(float(fields[0]), *fields[1:6]) if len(fields) >= 3 else None
    except ValueError:
        return None


@dataclass(frozen=True)
class RunFolder:
    """A run folder as the launcher sees it."""

    path: Path

    @property
    def launch(self) -> Path:
        """Where everything of the launcher is."""
        return self.path / "launch"

    @property
    def spec_file(self) -> Path:
        """Exists exactly when the run was submitted."""
        return self.launch / "spec.json"

    @property
    def script(self) -> Path:
        """The job script of this run alone."""
        return self.launch / "script.sh"

    def spec(self) -> dict[str, Any]:
        """What was submitted."""
        content: dict[str, Any] = json.loads(self.spec_file.read_text())
        return content

    def events(self) -> list[Event]:
        """What happened, oldest first."""
        try:
            lines = (self.launch / "events.tsv").read_text().splitlines()
        except OSError:
            return []
        return [event for line in lines if (event := _event(line)) is not None]

    def add_event(self, event: Event) -> None:
        """Append one line, as the job script does."""
        fields = (event.name, event.job, event.status, event.attempt, event.reason)
        with (self.launch / "events.tsv").open("a") as file:
            file.write("\t".join([str(int(event.time)), *fields]) + "\n")

    def last_event(self) -> Event | None:
        """The newest event."""
        events = self.events()
        return events[-1] if events else None

    def note_submission(self, job: str, events_before: int) -> None:
        """A job for this run is in the queue; it may have started already."""
        content = {"job": job, "events_before": events_before}
        write_atomically(self.launch / "submitted.json", json.dumps(content) + "\n")
        (self.launch / "withdrawn").unlink(missing_ok=True)

    def waiting_job(self) -> str | None:
        """The id of a submitted job that has not started."""
        try:
            content = json.loads((self.launch / "submitted.json").read_text())
            job, before = str(content["job"]), int(content["events_before"])
        except (OSError, ValueError, TypeError, KeyError):  # not there, or cut off
            return None
        return job if len(self.events()) <= before else None

    def job(self) -> str | None:
        """The id of the newest job."""
        if (waiting := self.waiting_job()) is not None:
            return waiting
        event = self.last_event()
        if event is None:
            return None
        return event.reason if event.name == "follow_up" else event.job

    def is_active(self) -> bool:
        """As far as the run folder knows, something will still happen by itself."""
        event = self.last_event()
        started = event is not None and event.name not in FINAL
        return started or self.waiting_job() is not None

    def attempts(self) -> list[Path]:
        """Folders of the attempts, oldest first."""
        folder = self.launch / "attempts"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def last_attempt(self) -> Path | None:
        """The newest attempt."""
        attempts = self.attempts()
        return attempts[-1] if attempts else None

    def job_log(self) -> list[str]:
        """What the job script itself printed, for a run that never got to an attempt."""
        files = [*self.launch.glob("*_log.out"), *self.launch.glob("local.log")]
        if not files:
            return []
        newest = max(files, key=lambda file: file.stat().st_mtime)
        return newest.read_text(errors="replace").splitlines()

    def counters(self) -> dict[str, int]:
        """How often the run went back into the queue: preemptions, timeouts, failures, requests."""
        folder = self.launch / "counters"
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return {file.name: int(file.read_text() or 0) for file in files}

    def reset_counters(self) -> None:
        """Start counting anew: somebody looked and said retry."""
        for name in self.counters():
            (self.launch / "counters" / name).unlink()

    def request(self, text: str) -> bool:
        """Ask the running attempt to save and stop; False when there is none.

        ``text`` is ``end`` (stay stopped) or ``requeue`` (continue at once), for the job script.
        """
        attempt = self.last_attempt()
        event = self.last_event()
        if attempt is None or event is None or event.name != "started":
            return False
        write_atomically(attempt / "stop", f"{text}\n")
        return True


def find_runs(roots: list[Path]) -> list[RunFolder]:
    """Submitted runs at or below these folders, oldest submission first.

    Raises:
        ValueError: a folder that does not exist.
    """
    found: dict[Path, RunFolder] = {}
    for root in roots:
        if not root.exists():
            raise ValueError(f"{root}: no such folder; give a run folder, or one with runs in it")
        for path in _submitted_below(root):
            found[path.resolve()] = RunFolder(path)
    return sorted(found.values(), key=lambda run: run.spec_file.stat().st_mtime)


def _submitted_below(root: Path) -> Iterator[Path]:
    if (root / "launch" / "spec.json").exists():
        yield root
        return
    for folder, below, _files in os.walk(root):
        if Path(folder, "launch", "spec.json").exists():
            yield Path(folder)
            below.clear()


def write_atomically(path: Path, text: str) -> None:
    """Nobody reads half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)
