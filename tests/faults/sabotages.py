"""Faults that a test asks for by name; they run inside the training process."""

from __future__ import annotations

import os
import time
from typing import Any


def _on_step(step: int, rank: int, act: Any) -> None:
    """Do something in the optimizer step ``step`` of one rank, before it."""
    if int(os.environ["RANK"]) != rank:
        return
    from disco_ds.trainer import Trainer

    original = Trainer._train_step

    def broken(self: Any, batch: Any) -> Any:
        if self.counters.step + 1 == step:
            act(self)
        return original(self, batch)

    Trainer._train_step = broken  # type: ignore[method-assign]


def sleep_in_step_3() -> None:
    _on_step(3, 1, lambda trainer: time.sleep(3600))


def die_in_step_3() -> None:
    _on_step(3, 1, lambda trainer: os._exit(9))


def _broken_gradient(rank: int, factor: float) -> None:
    """The gradient of one parameter alone, before any reduction, the first time step 3 is tried."""

    def act(trainer: Any) -> None:
        trainer.armed = trainer.counters.skipped_steps == 0

        def poison(gradient: Any) -> Any:
            return gradient * factor if trainer.armed else gradient

        def after_embedding(module: Any, inputs: Any, output: Any) -> None:
            if output.requires_grad:
                output.register_hook(poison)

        if not hasattr(trainer, "poisoned"):
            # Engines replace parameters while they compute; what comes out of a module stays.
            embedding = trainer.strategy.module.clip.token_embedding
            trainer.poisoned = embedding.register_forward_hook(after_embedding)

    _on_step(3, rank, act)


def nan_gradient_in_step_3() -> None:
    _broken_gradient(rank=1, factor=float("nan"))


def infinite_gradient_in_step_3() -> None:
    _broken_gradient(rank=1, factor=float("inf"))


def nan_gradient_alone() -> None:
    _broken_gradient(rank=0, factor=float("nan"))


def disk_full_at_step_6() -> None:
    """Rank 1 cannot write its part of the second checkpoint."""
    if int(os.environ["RANK"]) != 1:
        return
    import torch

    original = torch.save

    def full(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if "step_00000006" in str(path):
            raise OSError(28, "No space left on device", str(path))
        original(value, path, *args, **kwargs)

    torch.save = full


def slow_files() -> None:
    """A slow file system: a save in the background takes several steps."""
    import torch

    original = torch.save

    def slow(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        original(value, path, *args, **kwargs)

    torch.save = slow


def sees_no_checkpoint() -> None:
    if int(os.environ["RANK"]) == 1:
        from pathlib import Path

        is_dir = Path.is_dir
        Path.is_dir = lambda self: "step_" not in self.name and is_dir(self)  # type: ignore


def sees_another_manifest() -> None:
    if int(os.environ["RANK"]) == 1:
        from disco_ds.checkpoint import read

        original = read.digest
        read.digest = lambda path: "other" if "manifest" in path.name else original(path)


def saves_on_rank_1_in_step_2() -> None:
    """A user's own request, from one rank only."""
    _on_step(2, 1, lambda trainer: trainer.save())


def overflows_for_ever() -> None:
    """Every rank's fp16 gradients are infinite."""
    from disco_ds.strategies.loss_scale import LossScale
    from disco_ds.trainer import Trainer

    original = Trainer._train_step
    LossScale.__init__.__defaults__ = (4.0, 2000)

    def broken(self: Any, batch: Any) -> Any:
        if not hasattr(self, "_poisoned"):
            self._poisoned = True
            parameter = next(self.strategy.module.parameters())
            parameter.register_hook(lambda g: g * float("inf"))
        return original(self, batch)

    Trainer._train_step = broken  # type: ignore[method-assign]
