"""Starting the processes that read, and starting them again when a fork got stuck.

A fork copies one thread of a process that has many. A lock that another one holds at that moment
is never released in the child: CPython's own list of threads, for one, which a communication thread
enters and leaves as a collective ends. Such a child waits for ever, before any code of ours runs.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from disco_ds.data.batch import DataWorkerError
from disco_ds.preemption import obey_parent_only

logger = logging.getLogger(__name__)

REPORT_SECONDS, ATTEMPTS, POLL_SECONDS = 30.0, 3, 0.01


class Arrivals:
    """``worker_init_fn``: each worker leaves its process id as it begins to work."""

    def __init__(self, num_workers: int) -> None:
        self._pids = RawArray(ctypes.c_int64, max(1, num_workers))

    def __call__(self, worker: int) -> None:
        """In the worker."""
        # Ctrl-C and a scheduler's warnings, which reach all processes, are the trainer's.
        obey_parent_only()
        self._pids[worker] = os.getpid()

    def missing(self, processes: Sequence[BaseProcess]) -> list[BaseProcess]:
        """Processes that live but have not begun to work."""
        arrived = set(self._pids)
        return [one for one in processes if one.pid not in arrived and one.is_alive()]


def start_workers(
    make_loader: Callable[[Arrivals], DataLoader[Any]], num_workers: int, *, is_fork: bool
) -> Iterator[Any]:
    """The loader's iterator, with all workers at work (or dead, which the loader tells).

    Only forked workers are waited for; those of other start methods begin in a new interpreter.
    None inherits a dispatch mode, such as the count of tensors in a run's first steps, which would
    slow down every operator of a worker until it ends.

    Raises:
        DataWorkerError: workers got stuck :data:`ATTEMPTS` times.
    """
    for attempt in range(1, ATTEMPTS + 1):
        arrivals, others = Arrivals(num_workers), active_children()
        with _disable_current_modes():
            iterator = iter(make_loader(arrivals))
        own = [process for process in active_children() if process not in others]
        if not is_fork or not (stuck := _wait(arrivals, own)):
            return iterator
        logger.warning(
            "%d of %d data workers did not start within %g s: attempt %d of %d",
            *(len(stuck), num_workers, REPORT_SECONDS, attempt, ATTEMPTS),
        )
        _kill(stuck)
        del iterator
    raise DataWorkerError(
        f"data workers got stuck as they were forked, {ATTEMPTS} times; use "
        "--data.start_method forkserver"
    )


def _wait(arrivals: Arrivals, processes: Sequence[BaseProcess]) -> list[BaseProcess]:
    """Until all work or died, or time is up; those that are missing then."""
    deadline = time.monotonic() + REPORT_SECONDS
    while (missing := arrivals.missing(processes)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return missing


def _kill(processes: Sequence[BaseProcess]) -> None:
    """End processes that hear nothing but SIGKILL."""
    for _ in range(2):  # again after the loader's error about the first that died
        with suppress(RuntimeError):
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
