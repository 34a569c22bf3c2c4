"""Ranks, medians and best answers equal brute force, with ties and on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import run_distributed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.distributed import World
from disco_ds.evaluation.ranking import Side, captions_side, images_side, rank_answers
from disco_ds.evaluation.retrieval import median_rank

CAPTIONS = [2, 0, 1, 3, 1, 5, 1, 1, 2, 1, 4]
"""How many captions image n has; ranks get uneven shares, and one image has none."""


def sides(world: World, *, width: int = 3) -> tuple[Side, Side]:
    """Small integer features: ties everywhere."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(len(CAPTIONS))
    owners = rows.repeat_interleave(torch.tensor(CAPTIONS))
    numbers = torch.cat([torch.arange(count) for count in CAPTIONS])
    images = torch.randint(-1, 2, (len(rows), width), generator=generator).float()
    texts = torch.randint(-1, 2, (len(owners), width), generator=generator).float()
    own, own_texts = (part % world.world_size == world.rank for part in (rows, owners))
    return (
        images_side(images[own], rows[own]),
        captions_side(texts[own_texts], owners[own_texts], numbers[own_texts]),
    )


def brute_force(queries: Side, keys: Side) -> tuple[list[int], list[list[int]]]:
    ranks, answers = [], []
    for feature, row in zip(queries.features, queries.rows, strict=True):
        scores = (keys.features @ feature).tolist()
        order = sorted(range(len(scores)), key=lambda j: (-scores[j], int(keys.places[j])))
        right = [place for place, j in enumerate(order) if keys.rows[j] == row]
        wrong = [place for place, j in enumerate(order) if keys.rows[j] != row]
        ahead = len([place for place in wrong if right and place < right[0]])
        ranks.append(ahead if right else len(scores))
        answers.append([int(keys.places[j]) for j in order[:3]])
    return ranks, answers


def check(world: World) -> None:
    images, texts = sides(world)
    all_images, all_texts = sides(World())
    for queries, keys, whole, all_keys in (
        (images, texts, all_images, all_texts),
        (texts, images, all_texts, all_images),
    ):
        expected, answers = brute_force(whole, all_keys)
        both = zip(expected, answers, strict=True)
        by_place = dict(zip(whole.places.tolist(), both, strict=True))
        for chunk_size in (1, 4, 100):
            found = rank_answers(queries, keys, world, chunk_size=chunk_size)
            parts = (queries.places, found.ranks, found.top_places)
            for place, rank, top in zip(*(part.tolist() for part in parts), strict=True):
                assert (rank, top) == by_place[place]


def test_one_process() -> None:
    check(World())


def _on_ranks(rank: int, world_size: int) -> None:
    check(World(rank, world_size, rank))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_give_the_same(world_size: int) -> None:
    run_distributed(_on_ranks, world_size=world_size)


def test_captions_of_the_image_itself_do_not_stand_in_its_way() -> None:
    images = images_side(torch.eye(2), torch.arange(2))
    features = torch.tensor([[0.9, 0.0], [1.0, 0.0], [0.95, 0.0]])
    texts = captions_side(features, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    assert rank_answers(images, texts, World(), chunk_size=2).ranks.tolist() == [0, 2]


@pytest.mark.parametrize("values", [[0, 2], [3], [0, 0, 5, 9], [1, 2, 3]])
def test_median_rank_is_open_clips(values: list[int]) -> None:
    assert median_rank(torch.tensor(values)) == int(np.floor(np.median(values)) + 1)


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any result."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_memory_is_bounded_by_the_chunk() -> None:
    count, width, chunk = 3000, 8, 100
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(count)
    images = images_side(torch.randn(count, width, generator=generator), rows)
    texts = captions_side(torch.randn(count, width, generator=generator), rows, rows * 0)
    with _LargestTensor() as seen:
        rank_answers(images, texts, World(), chunk_size=chunk)
    assert seen.largest <= max(chunk * chunk, count * width)
