"""Metrics equal brute force, and every engine and number of ranks gives the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import build
from harness import run_distributed
from sklearn.metrics import balanced_accuracy_score, top_k_accuracy_score
from tiny import CONTEXT, IMAGE_SIZE, VOCABULARY, random_pairs, tiny_encoders
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.evaluation.encode import EvalSample
from disco_ds.evaluation.retrieval import best_ranks, evaluate_retrieval
from disco_ds.evaluation.zero_shot import ZeroShotTask, evaluate_zero_shot
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.single import SingleStrategy

SIZE = (IMAGE_SIZE, IMAGE_SIZE)
TASK = ZeroShotTask("toy", ("a", "b", "c", "d", "e", "f", "g"), ("x {c}", "{c} y"), ())


def tokenize(texts: list[str]) -> Tensor:
    rows = [[1 + ord(char) % (VOCABULARY - 2) for char in text[:CONTEXT]] for text in texts]
    return torch.tensor([row + [0] * (CONTEXT - len(row)) for row in rows])


def samples(world: World, count: int) -> list[EvalSample]:
    images = random_pairs(count, seed=9).image
    return [
        EvalSample(row, images[row], [f"t{row * 7 + k}" for k in range(1 + row % 3)], row % 7)
        for row in range(count)
        if row % world.world_size == world.rank
    ]


def results(strategy: Strategy, count: int) -> dict[str, float]:
    strategy.setup(tiny_encoders(), OptimConfig())
    strategy.module.train()
    before = torch.get_rng_state()
    own = samples(strategy.world, count)
    settings = {"tokenize": tokenize, "image_size": SIZE, "batch_size": 2}
    retrieval = evaluate_retrieval(strategy, own, chunk_size=3, **settings)
    zero_shot = evaluate_zero_shot(strategy, TASK, own, **settings)
    assert strategy.module.training
    assert torch.equal(torch.get_rng_state(), before)
    return {**retrieval, **zero_shot}


def _compare(rank: int, world_size: int, expected: dict[int, dict[str, float]]) -> None:
    world = World(rank, world_size, rank)
    for name in ("ddp", "fsdp2", "zero2", "zero3"):
        for count, values in expected.items():
            strategy = build(name, world, pairs=world_size)
            assert results(strategy, count) == values
            strategy.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_work_exactly(world_size: int) -> None:
    """7 rows on 2 ranks in batches of 2, and fewer rows than ranks: no hang, equal numbers."""
    counts = (7, 2, 1)
    expected = {n: results(SingleStrategy(World(), precision="fp32"), n) for n in counts}
    assert expected[7]["num_images"] == 7
    run_distributed(_compare, expected, world_size=world_size)


def test_ranks_by_brute_force_with_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(-1, 2, (23, 3), generator=generator).float()
    keys = torch.randint(-1, 2, (31, 3), generator=generator).float()
    query_ids, key_ids = torch.arange(23) % 9, torch.arange(31) % 11
    found = best_ranks(queries, keys, query_ids, key_ids, chunk_size=5)
    scores = queries @ keys.T
    for i in range(23):
        order = sorted(range(31), key=lambda j: (-scores[i, j].item(), j))
        relevant = [place for place, j in enumerate(order) if key_ids[j] == query_ids[i]]
        assert found[i].item() == (relevant[0] if relevant else 31)


def test_zero_shot_equals_scikit_learn() -> None:
    strategy = SingleStrategy(World(), precision="fp32")
    strategy.setup(tiny_encoders(), OptimConfig())
    rows = samples(World(), 40)
    found = evaluate_zero_shot(
        strategy, TASK, rows, tokenize=tokenize, image_size=SIZE, batch_size=16
    )
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
    assert found["mean_per_class"] == pytest.approx(balanced)


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


def test_task_folder_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*classnames.txt"):
        ZeroShotTask.from_folder(tmp_path)
    (tmp_path / "classnames.txt").write_text("cat\n\n dog \n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a photo\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "nshards.txt").write_text("2\n")
    with pytest.raises(ValueError, match=r"no \{c\} in the template 'a photo'"):
        ZeroShotTask.from_folder(tmp_path)
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a {c}.\n")
    with pytest.raises(ValueError, match=r"no shard .*0\.tar \(nshards.txt says 2\)"):
        ZeroShotTask.from_folder(tmp_path)
    for number in range(2):
        (tmp_path / "test" / f"{number}.tar").touch()
    task = ZeroShotTask.from_folder(tmp_path)
    assert task.classes == ("cat", "dog")
    assert [Path(shard).name for shard in task.shards] == ["0.tar", "1.tar"]
