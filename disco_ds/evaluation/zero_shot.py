"""Zero-shot classification: one text prototype per class, images go to the nearest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from disco_ds.distributed import agree_on_error, gather_objects, sum_over_ranks
from disco_ds.evaluation.encode import (
    Encoder,
    EvalSample,
    Tokenize,
    encode_images,
    encode_shared,
    lockstep_batches,
    similarity,
)
from disco_ds.evaluation.tasks import ZeroShotTask, empty_classes_error, wrong_label_error

TOP = 5


@dataclass(frozen=True)
class Confusion:
    """Images of one class that were taken for another."""

    truth: str
    answer: str
    count: int
    share: float
    """Of all images of the class."""


@dataclass(frozen=True)
class ZeroShotResult:
    """Numbers, per class too; the same on every rank."""

    values: dict[str, float]
    total: tuple[int, ...]
    """Images of each class."""
    correct: tuple[int, ...]
    """Those whose first answer is right."""
    confusions: list[Confusion]
    """The most frequent mistakes, the largest share of a class first."""


def evaluate_zero_shot(
    encoder: Encoder,
    task: ZeroShotTask,
    samples: Iterable[EvalSample],
    *,
    tokenize: Tokenize,
    image_size: tuple[int, int],
    batch_size: int,
    num_confusions: int = 10,
) -> ZeroShotResult:
    """Top-1, top-5 (from 5 classes on) and mean per-class accuracy over all ranks' samples.

    Equal scores rank by class. Collective; the result is the same on every rank and for every
    number of ranks.

    Raises:
        ValueError: a label lies outside the classes, or a class has no image.
    """
    world, num_classes = encoder.world, len(task.classes)
    with encoder.evaluating():
        weights = _class_weights(encoder, task, tokenize, batch_size)
        wrong: ValueError | None = None
        counts = torch.zeros(3, num_classes, dtype=torch.float64)
        mistakes: Counter[tuple[int, int]] = Counter()
        for batch in lockstep_batches(samples, batch_size, world):
            features = encode_images(encoder, [s.image for s in batch], image_size, batch_size)
            odd = [s for s in batch if s.label is None or not 0 <= s.label < num_classes]
            if odd:
                wrong = wrong or wrong_label_error(task, odd[0].row, odd[0].label)
                continue
            labels = torch.tensor([s.label for s in batch], dtype=torch.int64)
            _count(similarity(features, weights), labels, counts, mistakes)
    agree_on_error(wrong, world)
    flat = sum_over_ranks(counts.flatten().tolist(), world)
    total, top1, top5 = torch.tensor(flat, dtype=torch.float64).view(3, -1)
    if not total.sum():
        raise ValueError(f"zero-shot set {task.name}: no labelled sample in its shards")
    if empty := (total == 0).nonzero().flatten().tolist():
        raise empty_classes_error(task, empty)
    values = {"top1": float(top1.sum() / total.sum())}
    if num_classes >= TOP:
        values["top5"] = float(top5.sum() / total.sum())
    values |= {
        "mean_per_class": float((top1 / total).mean()),
        "chance": 1 / num_classes,
        "num_images": float(total.sum()),
    }
    all_mistakes: Counter[tuple[int, int]] = sum(gather_objects(mistakes, world), Counter())
    return ZeroShotResult(
        values,
        tuple(int(n) for n in total.tolist()),
        tuple(int(n) for n in top1.tolist()),
        _worst(all_mistakes, total, task, num_confusions),
    )


def _count(
    scores: Tensor, labels: Tensor, counts: Tensor, mistakes: Counter[tuple[int, int]]
) -> None:
    """Add a batch: ``scores [b, classes]``; one that is not a number is no right answer."""
    if not len(labels):
        return
    own = scores.gather(1, labels[:, None])
    position = torch.arange(scores.shape[1])
    ahead = (scores > own) | ((scores == own) & (position < labels[:, None]))
    rank = ahead.sum(dim=1)
    rank[torch.isnan(own[:, 0])] = scores.shape[1]
    for row, hit in enumerate((torch.ones_like(rank), rank == 0, rank < TOP)):
        counts[row].index_add_(0, labels, hit.double())
    answers = scores.nan_to_num(-torch.inf).argmax(dim=1)
    pairs = zip(labels.tolist(), answers.tolist(), strict=True)
    mistakes.update(pair for pair in pairs if pair[0] != pair[1])


def _class_weights(
    encoder: Encoder, task: ZeroShotTask, tokenize: Tokenize, batch_size: int
) -> Tensor:
    """``[classes, d]``: the normalised mean of each class's normalised captions."""
    captions = [task.caption(t, name) for name in task.classes for t in task.templates]
    features = encode_shared(encoder, captions, tokenize, batch_size)
    per_class = features.view(len(task.classes), len(task.templates), -1).mean(dim=1)
    return F.normalize(per_class, dim=-1)


def _worst(
    mistakes: Counter[tuple[int, int]], total: Tensor, task: ZeroShotTask, limit: int
) -> list[Confusion]:
    found = [
        Confusion(task.classes[truth], task.classes[answer], count, count / float(total[truth]))
        for (truth, answer), count in sorted(mistakes.items())
    ]
    return sorted(found, key=lambda c: (-c.share, -c.count))[:limit]
