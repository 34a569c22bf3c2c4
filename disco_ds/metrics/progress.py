"""What people see while a run goes on: a bar or lines, and a word when nothing is learnt."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from disco_ds.distributed import World

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)


class Progress:
    """A live bar on a terminal, a plain line now and then elsewhere; main rank only."""

    def __init__(self, world: World, *, first_step: int, total_steps: int) -> None:
        self._bar: tqdm[Any] | None = None
        self._open = ExitStack()
        self._world = world
        self._total = total_steps
        if world.is_main and sys.stderr.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            # Log lines go above the bar instead of through it.
            self._open.enter_context(logging_redirect_tqdm([logging.getLogger("disco_ds")]))
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                unit="step",
                dynamic_ncols=True,
                smoothing=0.1,
            )

    def update(self, step: int, text: str, *, seconds_left: float) -> None:
        """Show the state after ``step`` steps."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._world.is_main:
            logger.info("step %d/%d  %s  ETA %s", step, self._total, text, _clock(seconds_left))

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
        self._open.close()


class PlateauWatch:
    """Says once when a loss does not leave chance level: collapsed features, or shuffled pairs."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.reports = 0

    def watch(self, loss: float, chance: float) -> None:
        """Take one logged loss."""
        self.reports = self.reports + 1 if abs(loss - chance) <= 0.01 * chance else 0
        if self.reports == self.patience:
            logger.warning(
                "the loss has stayed at chance (%.3f) for %d reports: are captions all alike or "
                "paired with the wrong images, or is the learning rate too high?",
                chance,
                self.reports,
            )


class Stopwatch:
    """Samples per second between two laps, pauses left out."""

    def __init__(self) -> None:
        self.pairs = 0
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Samples per second since the last lap."""
        now = time.perf_counter()
        rate = self.pairs / max(now - self._start, 1e-9)
        self.pairs, self._start = 0, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        begin = time.perf_counter()
        yield
        self._start += time.perf_counter() - begin


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
