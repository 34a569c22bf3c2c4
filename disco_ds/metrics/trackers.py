"""Trackers behind one small interface, and the guard that keeps their failures from a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes numbers and pictures at optimizer steps that never get smaller."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name; they may be NaN or infinite."""

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """One picture."""

    def close(self) -> None:
        """Write out what is left."""


class Guarded:
    """A tracker whose first failure, at whatever moment, is reported, and is its last call.

    Args:
        name: what to call it in the log.
        open_tracker: makes it.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self.name = name
        self._tracker: Tracker | None = None
        self._last_step = 0
        self._guard(lambda: setattr(self, "_tracker", open_tracker()))

    @property
    def works(self) -> bool:
        """Whether it has not failed yet."""
        return self._tracker is not None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Pass numbers on."""
        if (tracker := self._tracker) is not None:
            self._guard(lambda: tracker.scalars(self._step(step), values))

    def picture(self, step: int, name: str, draw: Callable[[], Image.Image]) -> None:
        """Draw a picture and pass it on."""
        if (tracker := self._tracker) is not None:
            self._guard(lambda: tracker.picture(self._step(step), name, draw()))

    def close(self) -> None:
        """Close it."""
        if (tracker := self._tracker) is not None:
            self._guard(tracker.close)
        self._tracker = None

    def _step(self, step: int) -> int:
        """Trackers drop what comes at a smaller step than they have seen."""
        self._last_step = max(step, self._last_step)
        return self._last_step

    def _guard(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._tracker = None
            reason = str(error).splitlines()[:1] or [type(error).__name__]
            logger.warning("%s is off from now on: %s", self.name, reason[0])


class TensorBoard:
    """Event files in ``folder``; what was logged from ``purge_step`` on is taken back."""

    def __init__(self, folder: Path, *, purge_step: int) -> None:
        # Without this the import looks for TensorFlow and, where present, loads all of it.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One curve each."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """On the Images tab."""
        import numpy as np

        self._writer.add_image(name, np.asarray(picture), step, dataformats="HWC")

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run that continues under the same id when the run is resumed.

    W&B drops whatever comes at a smaller step than its server has seen, which a resumed run would
    repeat. Steps therefore travel as an ordinary value that all charts are drawn over.
    """

    def __init__(self, run_dir: Path, *, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise RuntimeError("wandb is missing: pip install 'disco_ds[tracking]'") from error
        self._wandb: Any = wandb
        id_file = run_dir / "wandb_id.txt"
        known = id_file.read_text().strip() if id_file.is_file() else None
        self._run: Any = wandb.init(
            project=project,
            name=run_dir.resolve().name,
            id=known,
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
        )
        id_file.write_text(f"{self._run.id}\n")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One row of the run's history."""
        self._run.log({"step": step, **values})

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """A media panel."""
        self._run.log({"step": step, name: self._wandb.Image(picture)})

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()
