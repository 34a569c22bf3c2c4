"""Between two steps a run saves, or stops: one decision on all ranks, whoever asked for it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from disco_ds.checkpoint import CheckpointWriter
from disco_ds.distributed import any_rank, gather_objects
from disco_ds.preemption import Requests, stop_reason
from disco_ds.run_state import RunState
from disco_ds.watchdog import Watchdog


class Preempted(RuntimeError):
    """The run was asked to stop, and has saved; the same on every rank."""


class Saves:
    """When a run saves and when it stops.

    What ranks ask of each other travels in an all-reduce of the step (:meth:`own_requests`,
    :meth:`take_answer`); without one, after a step that was skipped, in one of 12 bytes.
    """

    def __init__(self, state: RunState, watchdog: Watchdog, *, last_step: int) -> None:
        self._state, self._world, self._watchdog = state, state.world, watchdog
        self._config, self._last_step = state.plan.config.checkpoint, last_step
        folder = state.plan.run_dir / "checkpoints"
        self._writer = CheckpointWriter(
            folder, self._config, state.world, first_step=state.counters.step
        )
        self._saved_step, self._saved_at = state.counters.step, time.monotonic()
        self._is_wanted = False
        self._stop_reason: str | None = None
        self._answer: Requests | None = None

    def ask(self) -> None:
        """For a checkpoint after the present step; any rank may, and one is enough."""
        self._is_wanted = True

    def own_requests(self) -> Tensor:
        """This rank's, now; fp32 [3], to be summed over ranks."""
        return torch.tensor(self._requests(), dtype=torch.float32, device=self._world.device)

    def take_answer(self, total: Tensor) -> None:
        """The sum of all ranks' requests; holds until the end of the step."""
        self._answer = Requests(*(total > 0).tolist())

    def save_or_stop_if_asked(self) -> None:
        """Between two steps. Collective.

        Raises:
            Preempted: on all ranks, after a save, when any of them was asked to stop.
            SaveFailed: on all ranks, when any of them could not write.
        """
        asked = self._answer or Requests(*any_rank(self._requests(), self._world))
        self._answer = None
        if self._writer.is_pending and (asked.stop or not asked.wait):
            self._writer.finish()
        if (self._is_due or asked.save or asked.stop) and self._step != self._saved_step:
            self._save()
        if asked.stop:
            self._writer.finish()
            raise Preempted(self._who_asked())

    def finish(self) -> None:
        """Wait for a checkpoint that is still being written. Collective.

        Raises:
            SaveFailed: on all ranks, when any of them could not write.
        """
        self._writer.finish()

    @property
    def _step(self) -> int:
        return self._state.counters.step

    @property
    def _is_due(self) -> bool:
        return is_due(self._step, self._config.every_steps) or self._step == self._last_step

    def _requests(self) -> Requests:
        self._stop_reason = stop_reason()
        save = self._is_wanted or self._is_late()
        return Requests(self._stop_reason is not None, save, self._writer.is_busy)

    def _is_late(self) -> bool:
        """The main rank's clock decides about saves by time."""
        minutes = self._config.every_minutes
        if minutes is None or not self._world.is_main:
            return False
        return time.monotonic() - self._saved_at >= 60 * minutes

    def _save(self) -> None:
        self._is_wanted = False
        with self._watchdog.phase("writing a checkpoint"):
            self._writer.save(self._state.snapshot())
        self._saved_step, self._saved_at = self._step, time.monotonic()

    def _who_asked(self) -> str:
        reasons = gather_objects(self._stop_reason, self._world)
        rank = next(rank for rank, text in enumerate(reasons) if text is not None)
        saved = f"saved after step {self._step}" if self._step else "nothing to save"
        return f"asked to stop by {reasons[rank]} on rank {rank}: {saved}; start again to continue"


def is_due(step: int, every: int | None) -> bool:
    """Whether what happens ``every`` so many steps happens after ``step``."""
    return every is not None and step > 0 and step % every == 0
