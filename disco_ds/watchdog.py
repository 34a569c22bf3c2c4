"""Where this process is, and an end to waiting for ever.

A collective that waits longer than the time-out raises on the ranks that wait in it. The rank they
wait for is stuck elsewhere (a file system, a debugger, a device): it has to end by itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STUCK = 1
"""Exit status of a process that this module ends."""


class Watchdog:
    """Says in which step and phase this rank is; ends it when one phase never ends.

    A phase that takes ``timeout_seconds`` is announced on stderr; after half as long again the
    process exits. So all ranks are gone within twice the time-out, and each one's place is in the
    log, also where a communication library aborts the process.

    Args:
        rank: of this process.
        timeout_seconds: the time-out of collectives.
    """

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self._steps: int | None = None
        self._phase = "start-up"
        self._since = time.monotonic()
        self._is_announced = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Begin to watch."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    @property
    def place(self) -> str:
        """Rank, step and phase, in words."""
        step = "" if self._steps is None else f"step {self._steps + 1}, "
        return f"rank {self.rank} in {step}{self._phase}"

    def tick(self) -> None:
        """Something was achieved: count the phase's time from now."""
        self._since, self._is_announced = time.monotonic(), False

    def enter(self, phase: str, *, steps_taken: int | None = None) -> None:
        """A new phase begins, in the step after so many where that is given."""
        self._phase = phase
        if steps_taken is not None:
            self._steps = steps_taken
        self.tick()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase with an end; afterwards the phase around it continues."""
        before = self._phase
        self.enter(name)
        yield  # an error keeps the phase it happened in
        self.enter(before)

    def _watch(self) -> None:
        pause = min(1.0, self.timeout_seconds / 20)
        while not self._stopped.wait(pause):
            waited = time.monotonic() - self._since
            if waited > 1.5 * self.timeout_seconds:
                self._say("gives up")
                os._exit(STUCK)
            if waited > self.timeout_seconds - pause and not self._is_announced:
                self._is_announced = True
                self._say("still waits")

    def _say(self, what: str) -> None:
        waited = time.monotonic() - self._since
        sys.stderr.write(
            f"error: {self.place}: no progress for {waited:.0f} s, {what} "
            f"(--timeout_seconds {self.timeout_seconds:g})\n"
        )
        sys.stderr.flush()
