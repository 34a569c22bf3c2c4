"""Which trackers a run writes to, beside its own ``metrics.jsonl``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrackingConfig:
    """Trackers. One that fails is reported once and left out; it never stops training."""

    tensorboard: bool = True
    """Write scalars and pictures for TensorBoard into the run folder."""

    wandb: str | None = None
    """Weights & Biases project to log to, with the extra `tracking`; none when not given.
    WANDB_MODE=offline in the environment keeps it on this machine, for `wandb sync`."""

    pictures: int = 8
    """How many training pairs and retrievals to show in the trackers; 0: no pictures."""

    def __post_init__(self) -> None:
        if self.pictures < 0:
            raise ValueError(f"--tracking.pictures {self.pictures}: must not be negative")
