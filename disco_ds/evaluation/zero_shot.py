"""Zero-shot classification over a folder as CLIP_benchmark lays out its webdataset test sets::

FOLDER/classnames.txt                            one class a line
FOLDER/zeroshot_classification_templates.txt     one caption a line, {c} is the class
FOLDER/test/nshards.txt, FOLDER/test/0.tar ...   image and .cls members
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from disco_ds.distributed import agree_on_error, sum_over_ranks
from disco_ds.evaluation.encode import EvalSample, encode_images, encode_texts, lockstep_batches
from disco_ds.strategies.base import Strategy

CLASS_FILE = "classnames.txt"
TEMPLATE_FILE = "zeroshot_classification_templates.txt"


@dataclass(frozen=True)
class ZeroShotTask:
    """Class names, caption templates and the shards of one test set."""

    name: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    shards: tuple[str, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ZeroShotTask:
        """Read a task.

        Raises:
            ValueError: a file of the layout is missing, or there is no class.
        """
        classes = _lines(folder / CLASS_FILE)
        templates = _lines(folder / TEMPLATE_FILE)
        count = _lines(folder / "test" / "nshards.txt")[0]
        if not count.isdigit():
            raise ValueError(f"{folder / 'test' / 'nshards.txt'}: {count!r} is not a number")
        if without := [t for t in templates if "{c}" not in t]:
            raise ValueError(f"{folder / TEMPLATE_FILE}: no {{c}} in the template {without[0]!r}")
        shards = tuple(str(folder / "test" / f"{number}.tar") for number in range(int(count)))
        if missing := [shard for shard in shards if not Path(shard).is_file()]:
            raise ValueError(f"zero-shot set: no shard {missing[0]} (nshards.txt says {count})")
        return cls(folder.name, classes, templates, shards)


def _lines(path: Path) -> tuple[str, ...]:
    try:
        lines = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    except OSError as error:
        raise ValueError(f"zero-shot set: cannot read {path} ({error.strerror})") from error
    if not lines:
        raise ValueError(f"zero-shot set: {path} is empty")
    return lines


def evaluate_zero_shot(
    strategy: Strategy,
    task: ZeroShotTask,
    samples: Iterable[EvalSample],
    *,
    tokenize: Callable[[list[str]], Tensor],
    image_size: tuple[int, int],
    batch_size: int,
) -> dict[str, float]:
    """Top-1, top-5 and mean per-class accuracy over all ranks' samples.

    Collective; the result is the same on every rank and for every number of ranks.

    Raises:
        ValueError: a label lies outside the classes, or there are no labelled samples.
    """
    with strategy.evaluating():
        weights = _class_weights(strategy, task, tokenize, batch_size)
        wrong: ValueError | None = None
        counts = torch.zeros(3, len(task.classes), dtype=torch.float64)
        for batch in lockstep_batches(samples, batch_size, strategy.world):
            features = encode_images(strategy, [s.image for s in batch], image_size)
            for sample, row in zip(batch, features, strict=True):
                label = sample.label
                if label is None or not 0 <= label < len(task.classes):
                    wrong = wrong or _wrong_label(sample, task)
                    continue
                order = torch.argsort(weights @ row, descending=True, stable=True)
                counts[0, label] += 1
                counts[1, label] += float(order[0] == label)
                counts[2, label] += float((order[:5] == label).any())
    agree_on_error(wrong, strategy.world)
    flat = sum_over_ranks(counts.flatten().tolist(), strategy.world)
    total, top1, top5 = torch.tensor(flat, dtype=torch.float64).view(3, -1)
    if not total.sum():
        raise ValueError(f"zero-shot set {task.name}: no labelled sample in its shards")
    present = total > 0
    return {
        "top1": float(top1.sum() / total.sum()),
        "top5": float(top5.sum() / total.sum()),
        "mean_per_class": float((top1[present] / total[present]).mean()),
        "chance": 1 / len(task.classes),
        "num_images": float(total.sum()),
    }


def _class_weights(
    strategy: Strategy, task: ZeroShotTask, tokenize: Callable[[list[str]], Tensor], size: int
) -> Tensor:
    """``[classes, d]``: the normalised mean of each class's normalised captions."""
    captions = [t.replace("{c}", name) for name in task.classes for t in task.templates]
    features = encode_texts(strategy, tokenize(captions), size)
    per_class = features.view(len(task.classes), len(task.templates), -1).mean(dim=1)
    return F.normalize(per_class, dim=-1)


def _wrong_label(sample: EvalSample, task: ZeroShotTask) -> ValueError:
    return ValueError(
        f"zero-shot set {task.name}: row {sample.row} has label {sample.label}, "
        f"but there are {len(task.classes)} classes"
    )
