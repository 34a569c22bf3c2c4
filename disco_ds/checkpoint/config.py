"""When to save and what to keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save. A run always saves at its end and when it is asked to stop."""

    every_steps: int = 1000
    """Save after every so many optimizer steps."""

    every_minutes: float | None = None
    """Also save when so many minutes have passed since the last save."""

    keep_last: int = 2
    """How many of the newest checkpoints to keep."""

    keep_every_steps: int | None = None
    """Keep checkpoints at multiples of so many steps for ever; a multiple of every_steps."""

    background: bool = False
    """Write files while training goes on; costs one more copy of the state in host memory."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_minutes", "keep_last", "keep_every_steps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--checkpoint.{name} {value}: must be positive")
        if self.keep_every_steps is not None and self.keep_every_steps % self.every_steps:
            raise ValueError(
                f"--checkpoint.keep_every_steps {self.keep_every_steps}: no checkpoint is saved "
                f"there unless it is a multiple of --checkpoint.every_steps {self.every_steps}"
            )
