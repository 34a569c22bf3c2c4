"""``disco-ds evaluate``: one process, or all ranks of a launcher together."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from disco_ds.distributed import (
    AgreedError,
    World,
    agreed,
    destroy_process_group,
    exit_alone,
    init_process_group,
    setup_logging,
)
from disco_ds.evaluation.frozen import FrozenModel
from disco_ds.evaluation.run import Evaluation, EvaluationConfig, Evaluator, check_evaluation
from disco_ds.evaluation.tasks import CLASS_FILE, TYPE_FILE, is_image_folder
from disco_ds.evaluation.weights import Weights, find_weights, load_model
from disco_ds.output import check_writable

logger = logging.getLogger(__name__)

# How long a rank that does not speak waits to be ended by the launcher.
QUIET_SECONDS = 15
FAILED = 1


@dataclass(frozen=True)
class EvaluateCommand:
    """Zero-shot classification and retrieval of a run, a checkpoint or open_clip weights.

    On several processes: torchrun --no_python --nproc_per_node 2 disco-ds evaluate ...
    """

    source: tyro.conf.Positional[Path]
    """A run folder, a checkpoint folder, a Hugging Face folder, or a file of open_clip weights."""

    data: tuple[str, ...] = ()
    """Sets, each evaluated by itself: CLIP_benchmark's webdataset folders, image folders, shards of
    image-caption pairs, or the demo data. Those of the run when not given."""

    model: str | None = None
    """open_clip's name of the model, for weights that come without its configuration."""

    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """JSON file for numbers, confusions and pictures; in RUN/evaluations the report shows it."""

    classes: str | None = None
    """Class names for all sets: a file, one a line, or imagenet; else each set's own."""

    templates: str | None = None
    """Caption templates for all sets: a file, imagenet (80) or simple (7); else each set's own."""

    batch_size: int | None = None
    """Images or captions per forward and rank; 64, or the run's, when not given."""

    chunk_size: int | None = None
    """Retrieval compares so many images with so many captions at a time."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the encoders. auto: as the run was trained, fp32 for a file."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    timeout_seconds: float = 1800.0
    """A collective that waits longer than this ends the evaluation."""

    def run(self) -> int:
        """Evaluate and print; returns the exit status."""
        world = World.from_environment(self.device)
        setup_logging(world)
        init_process_group(world, timeout_seconds=self.timeout_seconds)
        try:
            return self._run(world)
        except AgreedError:
            if not world.is_main:
                # The launcher ends all ranks when the first one exits: let the main rank speak.
                time.sleep(QUIET_SECONDS)
            raise
        except BaseException as error:
            exit_alone(FAILED, world, error)
            raise
        finally:
            destroy_process_group()

    def _run(self, world: World) -> int:
        with agreed(world):
            weights = find_weights(self.source, self.model)
            config = self._config(weights)
            tasks = check_evaluation(config, world)
            if world.is_main and self.output is not None:
                check_writable(self.output, "--output")
            clip = load_model(weights)
        precision = self.precision
        if precision == "auto":
            precision = (weights.run_config or {}).get("precision", "fp32")
        encoder = FrozenModel(clip.encoders, world, precision=precision)
        found = Evaluation()
        for name, part in self._parts(config).items():
            own = tasks if part.zero_shot else ()
            evaluator = Evaluator(part, own, clip.eval_transform, clip.tokenize, clip.image_size)
            _add(found, evaluator.evaluate(encoder), name)
        if world.is_main:
            self._report(found, weights)
        return 0

    def _parts(self, config: EvaluationConfig) -> dict[str, EvaluationConfig]:
        """By name: every retrieval set that was named alone, and classification with the first.

        Without ``--data`` they are one set, as in the run.
        """
        if not self.data or len(config.retrieval) < 2:
            return {"": config}
        names = unique_names(config.retrieval)
        parts = {
            name: replace(config, retrieval=(source,), zero_shot=())
            for name, source in zip(names, config.retrieval, strict=True)
        }
        return parts | {names[0]: replace(parts[names[0]], zero_shot=config.zero_shot)}

    def _config(self, weights: Weights) -> EvaluationConfig:
        """Which sets: those named, or those of the run."""
        own: dict[str, Any] = (weights.run_config or {}).get("evaluation", {})
        if self.data:
            retrieval, zero_shot = sort_sets(self.data)
        else:
            retrieval, zero_shot = (tuple(own.get(key, ())) for key in ("retrieval", "zero_shot"))
        if not retrieval and not zero_shot:
            raise ValueError(f"--data: nothing to evaluate {self.source} on; name a set")
        given: dict[str, Any] = {
            "classes": self.classes,
            "templates": self.templates,
            "batch_size": self.batch_size,
            "chunk_size": self.chunk_size,
        }
        if not self.data:
            given = {key: own.get(key) if value is None else value for key, value in given.items()}
        kept = {key: value for key, value in given.items() if value is not None}
        return replace(EvaluationConfig(retrieval=retrieval, zero_shot=zero_shot), **kept)

    def _report(self, found: Evaluation, weights: Weights) -> None:
        print(table(found.values))  # noqa: T201
        if self.output is not None:
            content = {"step": weights.step, "source": str(self.source), **asdict(found)}
            self.output.write_text(json.dumps(content))
            print(self.output)  # noqa: T201


def _add(total: Evaluation, part: Evaluation, name: str) -> None:
    """Put one set's results with the others, under ``retrieval_NAME`` where it has a name."""
    own = f"retrieval_{name}" if name else "retrieval"
    for key, value in part.values.items():
        head, kind, metric = key.split("/", 2)
        total.values[f"{head}/{own if kind == 'retrieval' else kind}/{metric}"] = value
    total.zero_shot.update(part.zero_shot)
    if "retrieval" in part.retrieval:
        total.retrieval[own] = part.retrieval["retrieval"]


def unique_names(sources: Sequence[str]) -> list[str]:
    """What tells sources apart: the last parts of their paths, as few as will do."""
    paths = [Path(source.removesuffix("/")) for source in sources]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        words = ["_".join([*path.parts[-count:-1], path.stem]) for path in paths]
        names = [re.sub(r"[^A-Za-z0-9.]+", "_", word).strip("_") for word in words]
        if len(set(names)) == len(names):
            return names
    return [f"{number}" for number in range(1, len(paths) + 1)]


def sort_sets(data: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(shards for retrieval, folders for classification) among what a user names.

    Raises:
        ValueError: a folder that says it is of a kind that is not supported.
    """
    retrieval: list[str] = []
    zero_shot: list[str] = []
    for source in data:
        folder = Path(source)
        if (folder / "demo.json").is_file():
            retrieval.append(str(folder / "heldout"))
            zero_shot += [str(task) for task in sorted((folder / "zero_shot").iterdir())]
        elif _kind(folder) == "classification":
            zero_shot.append(source)
        else:
            retrieval.append(source)
    return tuple(retrieval), tuple(zero_shot)


def _kind(folder: Path) -> str:
    stated = folder / TYPE_FILE
    if stated.is_file():
        kind = stated.read_text().strip().lower()
        if kind not in ("retrieval", "classification"):
            raise ValueError(f"{stated}: {kind!r} is neither classification nor retrieval")
        return kind
    if (folder / CLASS_FILE).is_file() or (folder.is_dir() and is_image_folder(folder)):
        return "classification"
    return "retrieval"


def table(values: dict[str, float]) -> str:
    """Results for a terminal, a set after the other."""
    lines, current = [], ""
    for key, value in values.items():
        _, name, metric = key.split("/", 2)
        if name != current:
            lines.append(name)
            current = name
        whole = metric.startswith("num_") or metric.endswith("rank")
        text = f"{value:g}" if whole else f"{100 * value:.2f} %"
        lines.append(f"  {metric:<28}{text:>10}")
    return "\n".join(lines)
