"""Where numbers go: ``metrics.jsonl``, TensorBoard, a progress bar. One axis: optimizer steps."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from disco_ds.distributed import World

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Writes one JSON object a line and the same scalars to TensorBoard, on the main rank.

    A resumed run drops what was logged after the step it resumes from, so that the file reads as
    one uninterrupted run and no writer ever sees a smaller step.

    Args:
        run_dir: the run folder; it exists.
        world: this process; other ranks write nothing.
        first_step: the number of steps already taken.
    """

    def __init__(self, run_dir: Path, world: World, *, first_step: int) -> None:
        self._file: IO[str] | None = None
        self._board: SummaryWriter | None = None
        if not world.is_main:
            return
        path = run_dir / METRICS_FILE
        _truncate_after(path, first_step)
        self._file = path.open("a", buffering=1)
        self._board = _open_tensorboard(run_dir / "tensorboard", purge_step=first_step + 1)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Log values at an optimizer step; NaN and infinities become null, JSON has none."""
        if self._file is None:
            return
        line = {key: v if math.isfinite(v) else None for key, v in values.items()}
        self._file.write(json.dumps({"step": step, **line}) + "\n")
        if self._board is not None:
            for key, value in values.items():
                self._board.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """All complete lines of a run's ``metrics.jsonl``."""
    lines = (run_dir / METRICS_FILE).read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _truncate_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in read_metrics(path.parent) if line["step"] <= step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
    partial.replace(path)


def _open_tensorboard(folder: Path, *, purge_step: int) -> SummaryWriter | None:
    # Without this the import looks for TensorFlow and, where present, loads all of it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception as error:
        logger.warning("TensorBoard logging is off: %s", error)
        return None
    return SummaryWriter(str(folder), purge_step=purge_step)


class Progress:
    """A live bar on a terminal, a plain line now and then elsewhere; main rank only."""

    def __init__(self, world: World, *, first_step: int, total_steps: int) -> None:
        self._bar: tqdm[Any] | None = None
        self._world = world
        self._total = total_steps
        if world.is_main and sys.stderr.isatty():
            from tqdm import tqdm

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


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
