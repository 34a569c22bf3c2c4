"""A run beside its plan: what the planner said at the start, what was measured by the end."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from disco_ds.config import TrainConfig
from disco_ds.distributed import World
from disco_ds.report.record import PLAN_FILE
from disco_ds.strategies.base import Strategy

if TYPE_CHECKING:
    from disco_ds.planner.run import PeakMeasure, Prediction

logger = logging.getLogger(__name__)


class PlanWatch:
    """Predicts on the main rank, measures there, and leaves both in ``plan.json``.

    On a CPU tensors are counted in the first three steps, which slows them down; on CUDA the
    allocator counts. Does nothing on other ranks and with ``--plan False``. A plan that cannot be
    made never stops a run.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, world: World) -> None:
        self._config, self._run_dir, self._world = config, run_dir, world
        self._peak: PeakMeasure | None = None
        self._prediction: Prediction | None = None
        self._counted: dict[str, float] = {}

    def start(self, strategy: Strategy, num_samples: int) -> None:
        """Predict, then begin to measure: before model and engine are made, which count too."""
        # Compiled blocks hide their operators.
        if not self._config.plan or not self._world.is_main or self._config.engine.compile:
            return
        from disco_ds.planner.run import PeakMeasure, predict_run

        try:
            self._prediction = predict_run(
                self._config, strategy, self._world, num_samples=num_samples
            )
        except Exception as error:
            logger.warning("no plan of this run: %s", error)
            return
        logger.info("%s", self._prediction.line())
        self._write()
        self._peak = PeakMeasure(self._world.device).start()

    def step_begins(self) -> None:
        """Before every step."""
        if self._peak is not None:
            self._peak.step_begins()

    def step_taken(self) -> None:
        """After every step, taken or skipped."""
        if self._peak is not None:
            self._peak.step_taken()

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take the bytes of a step from what a counting hook logs."""
        if counted := {k: v for k, v in metrics.items() if k.startswith("comm/")}:
            self._counted = counted

    def finish(self) -> None:
        """At the end of training."""
        if self._peak is None or self._prediction is None:
            return
        from disco_ds.planner.run import measured_line

        peak = self._peak.peak()
        if peak:
            logger.info("%s", measured_line(self._prediction, peak, self._counted))
        self._write(peak)

    def _write(self, peak: float = 0.0) -> None:
        assert self._prediction is not None
        predicted = {
            "peak_memory_bytes": self._prediction.peak,
            "bytes_per_step": self._prediction.counted_bytes,
        }
        measured = {"peak_memory_bytes": peak} if peak else {}
        if own := sum(v for name, v in self._counted.items() if name.endswith("_bytes")):
            measured["bytes_per_step"] = own
        content = {"predicted": predicted, "measured": measured}
        (self._run_dir / PLAN_FILE).write_text(json.dumps(content, indent=1) + "\n")
