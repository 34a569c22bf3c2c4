"""Steps that are refused because a number in them is not finite: one decision on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from disco_ds.config import TrainConfig
from disco_ds.distributed import World, gather_objects
from disco_ds.grad_cache import NonFiniteLoss
from disco_ds.run_state import Counters
from disco_ds.strategies.loss_scale import LossScaleSpent

logger = logging.getLogger(__name__)

KEEP_GOING = (
    "Nothing was saved from this step; continue from the last checkpoint with --resume latest and "
    "a lower --optim.lr, a longer --optim.warmup_steps, --optim.max_grad_norm 1"
)


FindBroken = Callable[[], list[str]]


class TrainingStopped(RuntimeError):
    """Training cannot go on; the same decision on every rank."""


class Refusal:
    """Counts refused steps, or ends the run. Such a step has changed nothing.

    Collective throughout.
    """

    def __init__(self, config: TrainConfig, world: World, counters: Counters) -> None:
        self._config, self._world, self._counters = config, world, counters

    def of_loss(self, error: NonFiniteLoss) -> None:
        """The loss is not finite: no gradient has been computed.

        Raises:
            TrainingStopped: with ``--nonfinite stop``, or after too many in a row.
        """
        self._stop_or_skip("the loss was not finite", f"{error} ({self._where(error.tensors)})")

    def of_gradients(self, norm: float, find_broken: FindBroken) -> None:
        """The engine took no step: usual with fp16's loss scale, otherwise as for the loss.

        ``find_broken`` names this rank's gradients that are not finite. Collective.

        Raises:
            TrainingStopped: as :meth:`of_loss`.
        """
        if self._config.precision == "fp16":
            self._count("gradients overflowed", lambda: self._where(find_broken()))
            return
        reason = f"the gradient norm is {norm} ({self._where(find_broken())})"
        self._stop_or_skip("the gradients were not finite", reason)

    def of_overflow(self, error: LossScaleSpent, find_broken: FindBroken) -> NoReturn:
        """fp16's loss scale cannot become smaller.

        Raises:
            TrainingStopped: always.
        """
        step = self._counters.step + 1
        raise TrainingStopped(f"step {step}: {error} ({self._where(find_broken())})") from error

    def of_temperature(self, broken: list[str]) -> None:
        """Only the temperature's gradient is not finite; ``broken`` are this rank's.

        The encoders have taken the step: the temperature stays as it was, or the run ends.

        Raises:
            TrainingStopped: with ``--nonfinite stop``.
        """
        step = self._counters.step + 1
        reason = f"the temperature's gradient is not finite ({self._where(broken)})"
        if self._config.nonfinite == "stop":
            raise TrainingStopped(f"step {step}: {reason}. {KEEP_GOING}, or --nonfinite skip")
        logger.warning("step %d: %s; the temperature stays as it was", step, reason)

    def _where(self, broken: list[str]) -> str:
        """Ranks and tensors, in words."""
        found = enumerate(gather_objects(broken, self._world))
        ranks = [f"rank {rank}: {_shortened(names)}" for rank, names in found if names]
        return "; ".join(ranks) or "no rank finds it in its own features or gradients"

    def _stop_or_skip(self, short: str, reason: str) -> None:
        step = self._counters.step + 1
        if self._config.nonfinite == "stop":
            raise TrainingStopped(f"step {step}: {reason}. {KEEP_GOING}, or --nonfinite skip")
        logger.warning("step %d skipped: %s", step, reason)
        self._count(short, lambda: reason)

    def _count(self, short: str, last: Callable[[], str]) -> None:
        """One more in a row; ``last`` says more about it. Collective where ``last`` is."""
        counters = self._counters
        counters.skipped_steps += 1
        counters.skipped_in_a_row += 1
        if counters.skipped_in_a_row > self._config.max_skipped_steps:
            raise TrainingStopped(
                f"step {counters.step + 1}: {counters.skipped_in_a_row} optimizer steps "
                f"in a row were skipped because {short} (the last: {last()}); use "
                "--precision bf16, or a lower --optim.lr"
            )


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
