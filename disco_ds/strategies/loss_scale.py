"""The dynamic loss scale of fp16 training outside DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping


class LossScaleSpent(ValueError):
    """Gradients overflow at the smallest scale; the step changed nothing. On all ranks."""

    def __init__(self) -> None:
        super().__init__(
            "--precision fp16: gradients overflow at the smallest loss scale; use --precision bf16"
        )


class LossScale:
    """A power of two that lifts small fp16 gradients over the underflow limit.

    The global gradient norm says whether a step overflowed, so all ranks skip together, whatever
    part of the model each of them holds (torch's GradScaler asks every rank's own gradients).

    Args:
        initial: scale of the first step.
        growth_interval: good steps in a row after which the scale doubles.
    """

    MINIMUM = 1.0

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value = initial
        self.growth_interval = growth_interval
        self._good_steps = 0

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from a :meth:`state`, of DeepSpeed's scaler too."""
        self.value, self._good_steps = state["value"], int(state["good_steps"])

    def update(self, *, overflow: bool) -> None:
        """Halve after an overflow, double after many good steps.

        Raises:
            LossScaleSpent: overflow at the smallest scale.
        """
        if not overflow:
            self._good_steps += 1
            if self._good_steps == self.growth_interval:
                self.value, self._good_steps = self.value * 2, 0
            return
        if self.value <= self.MINIMUM:
            raise LossScaleSpent
        self.value, self._good_steps = self.value / 2, 0
