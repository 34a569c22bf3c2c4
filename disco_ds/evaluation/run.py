"""All evaluations of a run: which sets, and one call that does them on all ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from disco_ds.data.evaluation import evaluation_shards, read_samples
from disco_ds.distributed import World
from disco_ds.evaluation.encode import Encoder, EvalSample, Tokenize
from disco_ds.evaluation.gallery import gallery, read_pictures
from disco_ds.evaluation.retrieval import RetrievalResult, evaluate_retrieval
from disco_ds.evaluation.sources import read_task
from disco_ds.evaluation.tasks import ZeroShotTask, check_labels
from disco_ds.evaluation.zero_shot import ZeroShotResult, evaluate_zero_shot
from disco_ds.metrics import MetricsLog, retrieval_picture
from disco_ds.report import refresh_report

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

FOLDER = "evaluations"
"""Folder of a run with confusions and pictures, a file per evaluation."""


@dataclass(frozen=True)
class EvaluationConfig:
    """What is evaluated on images never trained on, and how often."""

    every_steps: int | None = None
    """Evaluate after every so many optimizer steps; only at the end when not given."""

    retrieval: tuple[str, ...] = ()
    """Webdataset shards of image-caption pairs for retrieval."""

    zero_shot: tuple[str, ...] = ()
    """Classification sets: folders as CLIP_benchmark's webdataset test sets, or image folders."""

    classes: str | None = None
    """Class names for all of them: a file, one a line, or imagenet; else each set's own."""

    templates: str | None = None
    """Caption templates for all of them: a file, imagenet (80) or simple (7); else each set's."""

    batch_size: int = 64
    """Images or captions per forward and rank."""

    chunk_size: int = 1024
    """Retrieval compares so many images with so many captions at a time: bounds its memory."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "batch_size", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--evaluation.{name} {value}: must be at least 1")


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found; the same on every rank but for the pictures."""

    values: dict[str, float] = field(default_factory=dict)
    """``eval/SET/METRIC``."""

    zero_shot: dict[str, Any] = field(default_factory=dict)
    """Per set: classes, images and right answers of each, worst confusions. JSON-ready."""

    retrieval: dict[str, Any] = field(default_factory=dict)
    """Per set: best and worst retrievals with pictures. JSON-ready; main rank only."""


@dataclass(frozen=True)
class Evaluator:
    """The evaluation sets of a run, found and read once."""

    config: EvaluationConfig
    tasks: tuple[ZeroShotTask, ...]
    image_transform: Callable[[Image.Image], Tensor]
    tokenize: Tokenize
    image_size: tuple[int, int]

    def run(self, encoder: Encoder) -> dict[str, float]:
        """Values named ``eval/SET/METRIC``. Collective; equal on all ranks."""
        return self.evaluate(encoder).values

    def evaluate(self, encoder: Encoder) -> Evaluation:
        """Numbers, confusions and pictures. Collective.

        BatchNorm statistics are averaged over ranks first.
        """
        encoder.average_buffers()
        found = Evaluation()
        if self.config.retrieval:
            result = self._retrieval(encoder)
            found.values.update({f"eval/retrieval/{k}": v for k, v in result.values.items()})
            if encoder.world.is_main:
                found.retrieval.update(self._pictures(result))
        for task in self.tasks:
            classified = self._zero_shot(encoder, task)
            head = f"eval/zero_shot_{task.name}"
            found.values.update({f"{head}/{k}": v for k, v in classified.values.items()})
            found.zero_shot[task.name] = {
                "classes": list(task.classes),
                "total": list(classified.total),
                "correct": list(classified.correct),
                "confusions": [asdict(confusion) for confusion in classified.confusions],
            }
        return found

    def _pictures(self, result: RetrievalResult) -> dict[str, Any]:
        """Nothing when the set cannot be read again: the numbers are there."""
        try:
            pictures = read_pictures(self.config.retrieval, result)
            return {"retrieval": gallery(result, pictures)}
        except Exception as error:
            logger.warning("no pictures of retrievals: %s", error)
            return {}

    def _retrieval(self, encoder: Encoder) -> RetrievalResult:
        rows = read_samples(
            self.config.retrieval, world=encoder.world, image_transform=self.image_transform
        )
        return evaluate_retrieval(
            encoder,
            map(EvalSample._make, rows),
            tokenize=self.tokenize,
            image_size=self.image_size,
            batch_size=self.config.batch_size,
            chunk_size=self.config.chunk_size,
            name=" ".join(self.config.retrieval),
        )

    def _zero_shot(self, encoder: Encoder, task: ZeroShotTask) -> ZeroShotResult:
        rows: Iterator[Any] = read_task(
            task, world=encoder.world, image_transform=self.image_transform
        )
        return evaluate_zero_shot(
            encoder,
            task,
            map(EvalSample._make, rows),
            tokenize=self.tokenize,
            image_size=self.image_size,
            batch_size=self.config.batch_size,
        )


def check_evaluation(
    config: EvaluationConfig, world: World | None = None
) -> tuple[ZeroShotTask, ...]:
    """Find all evaluation data before any work; labels are read on the main rank.

    Raises:
        ValueError: naming the file or folder that is missing or wrong.
    """
    if config.retrieval:
        evaluation_shards(config.retrieval)
    tasks = tuple(
        ZeroShotTask.from_folder(Path(folder), classes=config.classes, templates=config.templates)
        for folder in config.zero_shot
    )
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"--evaluation.zero_shot: two sets are called {twice[0]}; rename one of the folders"
        )
    if world is None or world.is_main:
        for task in tasks:
            check_labels(task)
    return tasks


def publish(found: Evaluation, log: MetricsLog, run_dir: Path, step: int, world: World) -> None:
    """Log an evaluation, show its pictures in the trackers, and bring the report up to date.

    On the main rank. Only the log of numbers matters: nothing else that fails stops training.
    """
    if not world.is_main or not found.values:
        return
    log.write(step, found.values)
    for name, directions in found.retrieval.items():
        for direction, qualities in directions.items():
            for quality, examples in qualities.items():
                if examples:
                    draw = partial(retrieval_picture, examples, limit=log.tracking.pictures)
                    log.picture(step, f"eval/{name}/{direction}_{quality}", draw)
    _write_details(run_dir, step, found)
    refresh_report(run_dir, world)


def summarize(results: dict[str, float]) -> str:
    """Evaluation results in one line, chance beside what was reached."""
    parts = []
    for direction in ("image_to_text", "text_to_image"):
        if (recall := results.get(f"eval/retrieval/{direction}_R@1")) is not None:
            chance = 1 / max(results["eval/retrieval/num_texts"], 1)
            parts.append(f"{direction} R@1 {recall:.1%} (chance {chance:.1%})")
    for key, value in results.items():
        if key.endswith("/top1"):
            task = key.removeprefix("eval/zero_shot_").removesuffix("/top1")
            chance = results[key.replace("/top1", "/chance")]
            parts.append(f"zero-shot {task} {value:.1%} (chance {chance:.1%})")
    return "  ".join(parts)


def _write_details(run_dir: Path, step: int, found: Evaluation) -> None:
    """Leave confusions and pictures for the report."""
    path = run_dir / FOLDER / f"step_{step:08d}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"step": step, **asdict(found)}))
    except OSError as error:
        logger.warning("%s: not written: %s", path, error)
