"""All evaluations of a run: which sets, and one call that does them on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from disco_ds.data.evaluation import evaluation_shards, read_samples
from disco_ds.evaluation.encode import EvalSample
from disco_ds.evaluation.retrieval import evaluate_retrieval
from disco_ds.evaluation.zero_shot import ZeroShotTask, evaluate_zero_shot
from disco_ds.strategies.base import Strategy

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationConfig:
    """What is evaluated on images never trained on, and how often."""

    every_steps: int | None = None
    """Evaluate after every so many optimizer steps; only at the end when not given."""

    retrieval: tuple[str, ...] = ()
    """Webdataset shards of image-caption pairs for retrieval."""

    zero_shot: tuple[str, ...] = ()
    """Folders laid out as CLIP_benchmark's webdataset test sets, one per classification task."""

    batch_size: int = 64
    """Images or captions per forward and rank."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.every_steps is not None and self.every_steps < 1):
            raise ValueError(
                f"--evaluation.batch_size {self.batch_size} and --evaluation.every_steps "
                f"{self.every_steps}: must be at least 1"
            )


@dataclass(frozen=True)
class Evaluator:
    """The evaluation sets of a run, found and read once."""

    config: EvaluationConfig
    tasks: tuple[ZeroShotTask, ...]
    image_transform: Callable[[Image.Image], Tensor]
    tokenize: Callable[[list[str]], Tensor]
    image_size: tuple[int, int]

    def run(self, strategy: Strategy) -> dict[str, float]:
        """Values named ``eval/SET/METRIC``. Collective; equal on all ranks.

        BatchNorm statistics are averaged over ranks first.
        """
        strategy.average_buffers()
        results: dict[str, float] = {}
        if self.config.retrieval:
            found = evaluate_retrieval(
                strategy,
                self._samples(self.config.retrieval, strategy),
                tokenize=self.tokenize,
                image_size=self.image_size,
                batch_size=self.config.batch_size,
            )
            results |= {f"eval/retrieval/{key}": value for key, value in found.items()}
        for task in self.tasks:
            found = evaluate_zero_shot(
                strategy,
                task,
                self._samples(task.shards, strategy),
                tokenize=self.tokenize,
                image_size=self.image_size,
                batch_size=self.config.batch_size,
            )
            results |= {f"eval/zero_shot_{task.name}/{key}": v for key, v in found.items()}
        return results

    def _samples(self, shards: Sequence[str], strategy: Strategy) -> Iterator[EvalSample]:
        rows = read_samples(shards, world=strategy.world, image_transform=self.image_transform)
        return map(EvalSample._make, rows)


def check_evaluation(config: EvaluationConfig) -> tuple[ZeroShotTask, ...]:
    """Find all evaluation data before any work.

    Raises:
        ValueError: naming the file or folder that is missing.
    """
    if config.retrieval:
        evaluation_shards(config.retrieval)
    return tuple(ZeroShotTask.from_folder(Path(folder)) for folder in config.zero_shot)
