"""Metrics equal brute force, and every engine and number of ranks gives the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import build
from harness import run_distributed
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, top_k_accuracy_score
from tiny import CONTEXT, IMAGE_SIZE, VOCABULARY, random_pairs, tiny_encoders
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.evaluation.encode import EvalSample
from disco_ds.evaluation.retrieval import Example, evaluate_retrieval
from disco_ds.evaluation.tasks import ZeroShotTask
from disco_ds.evaluation.zero_shot import evaluate_zero_shot
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.single import SingleStrategy

SIZE = (IMAGE_SIZE, IMAGE_SIZE)
TASK = ZeroShotTask("toy", ("a", "b", "c", "d", "e", "f", "g"), ("x {c}", "{c} y"), ())
ONE_CLASS = ZeroShotTask("toy", ("a",), ("x {c}",), ())


def tokenize(texts: list[str]) -> Tensor:
    """The text tower reads at the largest token, which therefore ends each caption."""
    rows = [[1 + ord(char) % (VOCABULARY - 2) for char in text[: CONTEXT - 1]] for text in texts]
    ended = [[*row, VOCABULARY - 1] for row in rows]
    return torch.tensor([row + [0] * (CONTEXT - len(row)) for row in ended])


def samples(world: World, count: int) -> list[EvalSample]:
    images = random_pairs(count, seed=9).image
    return [
        EvalSample(row, images[row], [f"t{row * 7 + k}" for k in range(1 + row % 3)], row % 7)
        for row in range(count)
        if row % world.world_size == world.rank
    ]


def results(strategy: Strategy, count: int) -> dict[str, Any]:
    """Everything that is evaluated; with fewer rows than classes, of one class."""
    strategy.setup(tiny_encoders(), OptimConfig())
    strategy.module.train()
    before = torch.get_rng_state()
    own = samples(strategy.world, count)
    task = TASK
    if count < len(TASK.classes):
        task, own = ONE_CLASS, [row._replace(label=0) for row in own]
    settings = {"tokenize": tokenize, "image_size": SIZE, "batch_size": 2}
    retrieval = evaluate_retrieval(strategy, own, chunk_size=3, **settings)
    zero_shot = evaluate_zero_shot(strategy, task, own, **settings)
    assert strategy.module.training
    assert torch.equal(torch.get_rng_state(), before)
    return {
        **retrieval.values,
        **zero_shot.values,
        "best": without_scores(retrieval.best),
        "worst": without_scores(retrieval.worst),
        "total": zero_shot.total,
        "correct": zero_shot.correct,
        "confusions": zero_shot.confusions,
    }


def without_scores(examples: dict[str, list[Example]]) -> dict[str, list[tuple[Any, ...]]]:
    """Engines order their sums differently, so that scores differ in the last digit."""
    return {key: [(e.place, e.rank, e.answers) for e in found] for key, found in examples.items()}


FEW = ("ddp", "fsdp2", "zero2", "zero3")
OTHERS = ("zero0", "zero1", "zero3_offload", "accelerate_ddp", "accelerate_fsdp2")


def _compare(
    rank: int, world_size: int, names: tuple[str, ...], expected: dict[int, dict[str, Any]]
) -> None:
    world = World(rank, world_size, rank)
    for name in names:
        for count, values in expected.items():
            strategy = build(name, world, pairs=world_size)
            assert results(strategy, count) == values
            strategy.close()


@pytest.mark.parametrize(
    ("world_size", "names", "counts"),
    [(2, FEW, (7, 2, 1)), (3, FEW, (7, 2, 1)), (2, OTHERS, (7,)), (2, ("accelerate_zero2",), (7,))],
)
def test_ranks_share_the_work_exactly(
    world_size: int, names: tuple[str, ...], counts: tuple[int, ...]
) -> None:
    """7 rows on 2 ranks in batches of 2, and fewer rows than ranks: no hang, equal numbers."""
    expected = {n: results(SingleStrategy(World(), precision="fp32"), n) for n in counts}
    assert expected[7]["num_images"] == 7
    run_distributed(_compare, names, expected, world_size=world_size)


def test_zero_shot_equals_scikit_learn() -> None:
    strategy = SingleStrategy(World(), precision="fp32")
    strategy.setup(tiny_encoders(), OptimConfig())
    rows = samples(World(), 40)
    result = evaluate_zero_shot(
        strategy, TASK, rows, tokenize=tokenize, image_size=SIZE, batch_size=16
    )
    found = result.values
    with strategy.evaluating():
        images, _ = strategy.encode(torch.stack([row.image for row in rows]), None)
        weights = []
        for name in TASK.classes:
            _, texts = strategy.encode(
                None, tokenize([t.replace("{c}", name) for t in TASK.templates])
            )
            weights.append(torch.nn.functional.normalize(texts, dim=-1).mean(0))
        weights = torch.nn.functional.normalize(torch.stack(weights), dim=-1)
        scores = torch.nn.functional.normalize(images, dim=-1) @ weights.T
    labels = [row.label for row in rows]
    assert found["top1"] == top_k_accuracy_score(labels, scores, k=1, labels=range(7))
    assert found["top5"] == top_k_accuracy_score(labels, scores, k=5, labels=range(7))
    balanced = balanced_accuracy_score(labels, scores.argmax(1))
    assert found["mean_per_class"] == pytest.approx(balanced, abs=1e-15)
    matrix = confusion_matrix(labels, scores.argmax(1))
    assert result.total == tuple(matrix.sum(1))
    assert result.correct == tuple(matrix.diagonal())
    mistakes = [
        (matrix[i, j] / matrix[i].sum(), matrix[i, j], TASK.classes[i], TASK.classes[j])
        for i in range(7)
        for j in range(7)
        if i != j and matrix[i, j]
    ]
    worst = sorted(mistakes, key=lambda m: (-m[0], -m[1], m[2], m[3]))[:10]
    assert [(c.share, c.count, c.truth, c.answer) for c in result.confusions] == worst


def test_equal_scores_rank_by_class() -> None:
    """Two names for the same thing: the first takes all, the second is next."""
    strategy = SingleStrategy(World(), precision="fp32")
    strategy.setup(tiny_encoders(), OptimConfig())
    task = ZeroShotTask("twins", ("a", "a"), ("x {c}",), ())
    rows = [row._replace(label=row.row % 2) for row in samples(World(), 10)]
    found = evaluate_zero_shot(
        strategy, task, rows, tokenize=tokenize, image_size=SIZE, batch_size=4
    )
    assert found.correct == (5, 0)
    assert [(c.truth, c.count) for c in found.confusions] == [("a", 5)]


def test_wrong_label_names_set_and_row() -> None:
    strategy = SingleStrategy(World(), precision="fp32")
    strategy.setup(tiny_encoders(), OptimConfig())
    rows = samples(World(), 3)
    rows[1] = rows[1]._replace(label=7)
    with pytest.raises(ValueError, match=r"zero-shot set toy: row 1 has label 7, .* 7 classes"):
        evaluate_zero_shot(strategy, TASK, rows, tokenize=tokenize, image_size=SIZE, batch_size=2)


def test_nothing_to_evaluate_is_an_error() -> None:
    strategy = SingleStrategy(World(), precision="fp32")
    strategy.setup(tiny_encoders(), OptimConfig())
    settings = {"tokenize": tokenize, "image_size": SIZE, "batch_size": 2}
    with pytest.raises(ValueError, match="the retrieval set is empty"):
        evaluate_retrieval(strategy, [], **settings)
    with pytest.raises(ValueError, match="zero-shot set toy: no labelled sample"):
        evaluate_zero_shot(strategy, TASK, [], **settings)


def test_a_class_without_images_is_an_error() -> None:
    strategy = SingleStrategy(World(), precision="fp32")
    strategy.setup(tiny_encoders(), OptimConfig())
    rows = [row for row in samples(World(), 40) if row.label != 3]
    with pytest.raises(ValueError, match=r"zero-shot set toy: no image of class 'd': leave such"):
        evaluate_zero_shot(strategy, TASK, rows, tokenize=tokenize, image_size=SIZE, batch_size=8)


def test_scores_that_are_no_numbers_are_no_right_answers() -> None:
    strategy = SingleStrategy(World(), precision="fp32")
    encoders = tiny_encoders()
    encoders.clip.visual.proj.data.fill_(float("nan"))
    strategy.setup(encoders, OptimConfig())
    settings = {"tokenize": tokenize, "image_size": SIZE, "batch_size": 8}
    rows = samples(World(), 14)
    assert evaluate_zero_shot(strategy, TASK, rows, **settings).values["top5"] == 0
    found = evaluate_retrieval(strategy, rows, **settings).values
    assert found["image_to_text_R@10"] == found["text_to_image_R@10"] == 0
    assert found["text_to_image_median_rank"] == 15


def _reading_fails_on_rank_1(rank: int, world_size: int) -> None:
    def rows() -> Iterator[EvalSample]:
        for row in samples(World(rank, world_size, rank), 11):
            if row.row == 5:
                raise OSError("cannot read 5.png")
            yield row

    strategy = build("ddp", World(rank, world_size, rank), pairs=world_size)
    strategy.setup(tiny_encoders(), OptimConfig())
    for evaluate, task in ((evaluate_retrieval, ()), (evaluate_zero_shot, (TASK,))):
        with pytest.raises(ValueError, match=r"rank 1: cannot read 5\.png"):
            evaluate(strategy, *task, rows(), tokenize=tokenize, image_size=SIZE, batch_size=2)


def test_a_set_that_one_rank_cannot_read_is_one_error_on_all() -> None:
    run_distributed(_reading_fails_on_rank_1, world_size=2)
