"""The run's own log, ``metrics.jsonl``, and the trackers that get the same numbers."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from disco_ds.distributed import World
from disco_ds.metrics.config import TrackingConfig
from disco_ds.metrics.trackers import Guarded, TensorBoard, WeightsAndBiases

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Writes one JSON object a line and the same scalars to the trackers, on the main rank.

    A resumed run drops what was logged after the step it resumes from, so that the file reads as
    one uninterrupted run and no writer ever sees a smaller step.

    Args:
        run_dir: the run folder; it exists.
        world: this process; other ranks write nothing.
        first_step: the number of steps already taken.
        tracking: which trackers.
        settings: the run's configuration, for trackers that show it.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        *,
        first_step: int,
        tracking: TrackingConfig | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._file: IO[str] | None = None
        self._trackers: list[Guarded] = []
        self.tracking = tracking or TrackingConfig()
        if not world.is_main:
            return
        path = run_dir / METRICS_FILE
        _truncate_after(path, first_step)
        self._file = path.open("a", buffering=1)
        self._trackers = _open_trackers(run_dir, self.tracking, settings or {}, first_step)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Log values at an optimizer step; NaN and infinities become null, JSON has none."""
        if self._file is None:
            return
        line = {key: v if math.isfinite(v) else None for key, v in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **line}) + "\n")
        except OSError as error:
            logger.warning("step %d is missing from %s: %s", step, METRICS_FILE, error)
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def picture(self, step: int, name: str, draw: Callable[[], Image.Image]) -> None:
        """Show a picture in the trackers; it is drawn only where there is one to show it."""
        if self.tracking.pictures:
            for tracker in self._trackers:
                tracker.picture(step, name, draw)

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                logger.warning("%s may lack its last lines: %s", METRICS_FILE, error)
            self._file = None
        for tracker in self._trackers:
            tracker.close()


def _open_trackers(
    run_dir: Path, tracking: TrackingConfig, settings: Mapping[str, Any], first_step: int
) -> list[Guarded]:
    found = []
    if tracking.tensorboard:
        folder = run_dir / "tensorboard"
        opening = partial(TensorBoard, folder, purge_step=first_step + 1)
        found.append(Guarded("TensorBoard", opening))
    if tracking.wandb is not None:
        opening_wandb = partial(
            WeightsAndBiases,
            run_dir,
            project=tracking.wandb,
            settings=settings,
        )
        found.append(Guarded("Weights & Biases", opening_wandb))
    return [tracker for tracker in found if tracker.works]


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """All complete lines of a run's ``metrics.jsonl``."""
    lines = (run_dir / METRICS_FILE).read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _truncate_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in read_metrics(path.parent) if line["step"] <= step]
    partial_file = path.with_suffix(".partial")
    partial_file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    partial_file.replace(path)
