"""Image-text retrieval over held-out pairs: R@1/5/10 and median rank, both directions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from disco_ds.distributed import World, sum_over_ranks
from disco_ds.evaluation.encode import (
    Encoder,
    EvalSample,
    Tokenize,
    all_gather_rows,
    encode_captions,
    encode_images,
    lockstep_batches,
)
from disco_ds.evaluation.ranking import (
    Ranking,
    Side,
    captions_side,
    images_side,
    rank_answers,
)

RECALLS = (1, 5, 10)


@dataclass(frozen=True)
class Example:
    """One query and its highest answers, for people to look at."""

    place: int
    rank: int
    """0: the best answer is right."""
    answers: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class RetrievalResult:
    """Numbers, and the best and worst queries of each direction; the same on every rank."""

    values: dict[str, float]
    best: dict[str, list[Example]]
    worst: dict[str, list[Example]]


def evaluate_retrieval(
    encoder: Encoder,
    samples: Iterable[EvalSample],
    *,
    tokenize: Tokenize,
    image_size: tuple[int, int],
    batch_size: int,
    chunk_size: int = 1024,
    num_examples: int = 4,
    name: str = "the retrieval set",
) -> RetrievalResult:
    """Recall of images by text and texts by image over all ranks' samples.

    Each sample is an image with one or more captions. A query scores by its best-ranked correct
    answer; equal similarities rank by row, then by caption. Collective; the result is the same on
    every rank and for every number of ranks. Memory: features of this rank's samples,
    ``chunk_size`` features of another rank and ``chunk_size x chunk_size`` similarities.

    Raises:
        ValueError: the set is empty, or no sample has a caption.
    """
    world = encoder.world
    images, texts = _encode(encoder, samples, tokenize, image_size, batch_size)
    num_images, num_texts = sum_over_ranks([len(images.rows), len(texts.rows)], world)
    if not num_images:
        raise ValueError(f"{name} is empty")
    if not num_texts:
        raise ValueError(f"{name}: no sample has a caption, neither .txt nor caption in .json")
    values: dict[str, float] = {}
    best, worst = {}, {}
    for direction, queries, keys in (
        ("image_to_text", images, texts),
        ("text_to_image", texts, images),
    ):
        ranking = rank_answers(queries, keys, world, chunk_size=chunk_size)
        places, whole = _in_order(queries.places, ranking, world)
        values |= _summary(direction, whole.ranks)
        best[direction], worst[direction] = _extremes(places, whole, num_examples)
    values |= {"num_images": num_images, "num_texts": num_texts}
    return RetrievalResult(values, best, worst)


def _encode(
    encoder: Encoder,
    samples: Iterable[EvalSample],
    tokenize: Tokenize,
    image_size: tuple[int, int],
    batch_size: int,
) -> tuple[Side, Side]:
    """This rank's images and captions."""
    rows: list[int] = []
    captions: list[tuple[int, int, str]] = []
    features = [torch.zeros(0, 0)]
    with encoder.evaluating():
        for batch in lockstep_batches(samples, batch_size, encoder.world):
            rows += [sample.row for sample in batch]
            captions += [(s.row, n, text) for s in batch for n, text in enumerate(s.captions)]
            found = encode_images(encoder, [s.image for s in batch], image_size, batch_size)
            features.append(found)
        texts = encode_captions(encoder, [text for *_, text in captions], tokenize, batch_size)
    whole = torch.cat(features[1:]) if features[1:] else features[0]
    numbers = torch.tensor([(row, n) for row, n, _ in captions], dtype=torch.int64).view(-1, 2)
    images = images_side(whole, torch.tensor(rows, dtype=torch.int64))
    return images, captions_side(texts, *numbers.T.contiguous())


def _in_order(places: Tensor, ranking: Ranking, world: World) -> tuple[Tensor, Ranking]:
    """All ranks' results in the order of places: a few numbers per query."""
    all_places = torch.cat(all_gather_rows(places, world))
    order = torch.argsort(all_places)
    whole = (torch.cat(all_gather_rows(part, world))[order] for part in ranking)
    return all_places[order], Ranking(*whole)


def _summary(direction: str, ranks: Tensor) -> dict[str, float]:
    result = {f"{direction}_R@{k}": float((ranks < k).double().mean()) for k in RECALLS}
    result[f"{direction}_median_rank"] = float(median_rank(ranks))
    return result


def median_rank(ranks: Tensor) -> int:
    """Median of 0-based ranks, rounded down, counted from 1: as open_clip has it."""
    values = ranks.sort().values
    middle = int(values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
    return middle + 1


def _extremes(places: Tensor, ranking: Ranking, count: int) -> tuple[list[Example], list[Example]]:
    """Right answers found first and surest, and those found last; ties by place."""
    by_score = torch.argsort(ranking.best, descending=True, stable=True)
    by_rank = by_score[torch.argsort(ranking.ranks[by_score], stable=True)]
    best = [row for row in by_rank.tolist() if ranking.ranks[row] == 0][:count]
    last = torch.argsort(ranking.ranks, descending=True, stable=True).tolist()
    worst = [row for row in last if ranking.ranks[row] > 0][:count]
    return (
        [_example(places, ranking, row) for row in best],
        [_example(places, ranking, row) for row in worst],
    )


def _example(places: Tensor, ranking: Ranking, row: int) -> Example:
    answers = ranking.top_places[row].tolist()
    kept = [position for position, place in enumerate(answers) if place >= 0]
    scores = ranking.top_scores[row].tolist()
    return Example(
        int(places[row]),
        int(ranking.ranks[row]),
        tuple(answers[position] for position in kept),
        tuple(scores[position] for position in kept),
    )
