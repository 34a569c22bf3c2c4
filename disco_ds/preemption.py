"""Asked to stop: remember a signal or a stop file until the step is finished.

Slurm, Kubernetes and people announce the end of a job with a signal, often to one rank only, or to
every process of a step. Nothing is done inside a handler; ranks agree at the end of a step, save
together and leave with :data:`EXIT_PREEMPTED`. Standard library only: installed before anything
heavy is imported, since a signal during start-up must not kill the process either.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

EXIT_PREEMPTED = 75
"""Exit status of a run that was asked to stop and saved: start it again (EX_TEMPFAIL)."""

STOP_FILE_VARIABLE = "DISCO_STOP_FILE"
"""Environment variable with the path of a file whose existence asks the run to stop."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_BLOCKED = (*STOP_SIGNALS, signal.SIGINT)
PARENT_CHECK_SECONDS = 2.0

_received: list[str] = []


class Requests(NamedTuple):
    """What a rank asks of all ranks between two steps, or what any of them asks."""

    stop: bool
    save: bool
    wait: bool
    """Not to touch the checkpoint that is still being written."""


def listen_for_stop() -> None:
    """Take SIGTERM, SIGUSR1 and SIGUSR2 as a request to stop. Main thread only; idempotent."""
    for number in STOP_SIGNALS:
        signal.signal(number, _remember)


def _remember(number: int, _frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    if name not in _received:
        _received.append(name)


def ignore_stop_signals() -> None:
    """For the last moments of a run: a second request must not change its exit status."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def shielded_children() -> Iterator[None]:
    """Processes started inside inherit a mask that blocks the stop signals and Ctrl-C.

    A scheduler signals every process of a job; data workers must not take it for their own end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent_only() -> None:
    """In a child: end at a SIGTERM of the parent, or when the parent is gone; at nothing else."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    threading.Thread(target=_wait_for_parent, args=(os.getppid(),), daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait(_BLOCKED, PARENT_CHECK_SECONDS)
        if received and received.si_signo == signal.SIGTERM and received.si_pid == parent:
            break
    os._exit(0)


def stop_reason() -> str | None:
    """What asked this process to stop, or None."""
    if _received:
        return _received[0]
    path = os.environ.get(STOP_FILE_VARIABLE)
    return f"stop file {path}" if path and Path(path).exists() else None
