"""A submitted run in Python, with the names of submitit's jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from disco_ds.launch.executor import clean_environment
from disco_ds.launch.failure import explain
from disco_ds.launch.folder import Event, RunFolder
from disco_ds.launch.state import RunState, last_metrics, look_up

POLL_SECONDS = 1.0


class JobFailed(RuntimeError):
    """The run failed; the text is the failure report."""


@dataclass(frozen=True)
class Job:
    """One submitted run: its state, logs and result. Works from any process, at any time."""

    run: RunFolder

    @property
    def job_id(self) -> str:
        """Slurm's id (``ID_INDEX`` in an array), or ``local-PID``."""
        return self.run.job() or ""

    @property
    def state(self) -> str:
        """pending, running, requeued, done, failed, stopped, cancelled or lost."""
        return self.look_up().state

    def look_up(self) -> RunState:
        """Everything that `status` shows."""
        return look_up([self.run])[0]

    def done(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.look_up().is_final

    def wait(self, timeout: float | None = None) -> Job:
        """Wait for the end.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause, next_question = POLL_SECONDS, 0.0
        while True:
            if not self.run.is_active():
                return self
            # The run folder says most; Slurm does not like to be asked all the time.
            if (now := time.monotonic()) >= next_question:
                if self.done():
                    return self
                pause = min(pause * 1.5, 20 * POLL_SECONDS)
                next_question = now + pause
            if deadline is not None and now > deadline:
                raise TimeoutError(f"{self.run.path}: {self.state} after {timeout:g} s")
            time.sleep(POLL_SECONDS / 4)

    def result(self, timeout: float | None = None) -> dict[str, float]:
        """The last logged metrics, after waiting for the end.

        Raises:
            JobFailed: it did not get to its end, with the failure report.
            TimeoutError: not within ``timeout`` seconds.
        """
        if (error := self.wait(timeout).exception()) is not None:
            raise error
        return last_metrics(self.run)

    def exception(self) -> JobFailed | None:
        """The failure report of a run that ended badly."""
        state = self.look_up()
        if not state.is_final or state.state == "done":
            return None
        attempt = self.run.last_attempt()
        report = explain(attempt).text() if attempt and state.state in ("failed", "lost") else ""
        return JobFailed(f"{self.run.path}: {state.state} {state.note}\n{report}".strip())

    def log_file(self, rank: int = 0) -> Path | None:
        """Output of a rank in the newest attempt."""
        attempt = self.run.last_attempt()
        return attempt / f"rank-{rank}.log" if attempt else None

    def stdout(self, rank: int = 0) -> str | None:
        """What a rank printed in the newest attempt, standard error included."""
        log = self.log_file(rank)
        return log.read_text(errors="replace") if log and log.exists() else None

    stderr = stdout

    def stop(self, *, requeue: bool = False) -> str:
        """Ask all ranks to save at the same step and end; returns what was done, in words.

        With ``requeue`` the run goes on at once under the same job id. A run that waits is
        cancelled.
        """
        state = self.look_up()
        if state.is_final:
            return f"{state.state} already"
        if state.state == "running" and self.run.request("requeue" if requeue else "end"):
            then = "continues under the same job id" if requeue else "`retry` continues it"
            return f"asked to save and stop; {then}"
        if requeue:
            return f"{state.state}: waits in the queue already"
        self._end_job()
        self._note("stopped", "was waiting")
        return "was waiting: taken out of the queue; `retry` continues it"

    def cancel(self) -> str:
        """End the run now, without saving; returns what was done, in words."""
        state = self.look_up()
        if state.is_final:
            return f"{state.state} already"
        if (attempt := self.run.last_attempt()) is not None:
            (attempt / "cancel").touch()
        self._end_job()
        self._note("cancelled", "by request")
        return "cancelled"

    def _note(self, name: str, reason: str) -> None:
        self.run.add_event(Event(time.time(), name, self.job_id, "", "", reason))

    def _end_job(self) -> None:
        job = self.job_id
        if self.run.waiting_job() is not None:
            # A local array would start it later.
            (self.run.launch / "withdrawn").touch()
            if job.startswith("local-"):
                return
        if not job.startswith("local-"):
            with clean_environment():
                subprocess.run(["scancel", job], check=True, timeout=60)
            return
        _kill_group(int(job.removeprefix("local-")))


def _kill_group(pid: int) -> None:
    """End a local job: its shell leads a process group with all ranks in it."""
    try:
        group = os.getpgid(pid)
    except ProcessLookupError:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        time.sleep(1)
