"""Ranks of the right answers without an N x N matrix, and without all features on any rank.

Every rank keeps its own queries; the keys of all ranks pass by in chunks. Right answers of a
query (the captions of an image, the image of a caption) live on its own rank, so that what a
query has to beat is known before the first chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.distributed import World, gather_objects
from disco_ds.evaluation.encode import similarity

CAPTION_BITS = 20
"""A caption's place is ``row << 20 | number``: in the order of rows, then of captions."""


class Side(NamedTuple):
    """The images, or the captions, of this rank."""

    features: Tensor
    """``[n, d]`` fp32, unit rows."""
    rows: Tensor
    """``[n]`` int64: the row of the set that each belongs to."""
    places: Tensor
    """``[n]`` int64, unique over ranks: equal similarities rank in this order."""

    def to(self, device: torch.device) -> Side:
        """The same on a device."""
        return Side(*(part.to(device) for part in self))


class Ranking(NamedTuple):
    """What became of this rank's queries."""

    ranks: Tensor
    """``[n]`` int64: how many wrong answers come before the first right one."""
    best: Tensor
    """``[n]`` fp32: similarity of the best right answer."""
    top_scores: Tensor
    """``[n, t]``: the highest similarities of all answers, right or wrong."""
    top_places: Tensor
    """``[n, t]``: and where they are."""


def images_side(features: Tensor, rows: Tensor) -> Side:
    """Images are ordered by row."""
    return Side(features, rows, rows)


def captions_side(features: Tensor, rows: Tensor, numbers: Tensor) -> Side:
    """Captions are ordered by row and by number within it."""
    return Side(features, rows, (rows << CAPTION_BITS) | numbers)


def row_of_caption(place: int) -> tuple[int, int]:
    """Row and number of a caption's place."""
    return place >> CAPTION_BITS, place & ((1 << CAPTION_BITS) - 1)


def rank_answers(
    queries: Side, keys: Side, world: World, *, chunk_size: int, num_top: int = 3
) -> Ranking:
    """Rank all ranks' keys for this rank's queries.

    Keys with a higher similarity come first, equal ones by place. A query without a right answer,
    or whose similarity is not a number, ranks behind everything. Collective; memory: a chunk of
    keys and ``chunk_size x chunk_size`` similarities.
    """
    best, first = (part.to(world.device) for part in _best_right_answers(queries, keys, chunk_size))
    queries = queries.to(world.device)
    ranks = torch.zeros_like(first)
    top_scores = torch.full((len(ranks), num_top), -torch.inf, device=world.device)
    top_places = torch.full_like(top_scores, -1, dtype=torch.int64)
    num_keys = 0
    for chunk in all_chunks(keys, world, chunk_size):
        num_keys += len(chunk.rows)
        for start in range(0, len(queries.rows), chunk_size):
            own = slice(start, start + chunk_size)
            scores = similarity(queries.features[own], chunk.features)
            ranks[own] += _count_ahead(scores, queries.rows[own], chunk, best[own], first[own])
            top_scores[own], top_places[own] = _merge_top(
                scores, chunk.places, top_scores[own], top_places[own]
            )
    ranks[~torch.isfinite(best)] = num_keys
    return Ranking(*(part.cpu() for part in (ranks, best, top_scores, top_places)))


def _count_ahead(scores: Tensor, rows: Tensor, keys: Side, best: Tensor, first: Tensor) -> Tensor:
    # A right answer never stands in the way, whatever the last digit of its own similarity.
    wrong = rows[:, None] != keys.rows[None, :]
    ties = (scores == best[:, None]) & (keys.places[None, :] < first[:, None])
    return (wrong & ((scores > best[:, None]) | ties)).sum(dim=1)


def _merge_top(
    scores: Tensor, places: Tensor, top_scores: Tensor, top_places: Tensor
) -> tuple[Tensor, Tensor]:
    """The best of what was found and a chunk; ties by place."""
    num_top = top_scores.shape[1]
    found, columns = _first_best(scores.nan_to_num(-torch.inf), min(num_top, scores.shape[1]))
    all_scores = torch.cat([top_scores, found], dim=1)
    all_places = torch.cat([top_places, places[columns]], dim=1)
    order = torch.argsort(all_places, dim=1, stable=True)
    by_score = torch.argsort(all_scores.gather(1, order), dim=1, descending=True, stable=True)
    order = order.gather(1, by_score)[:, :num_top]
    return all_scores.gather(1, order), all_places.gather(1, order)


def _first_best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As ``topk``, which does not say which of equal values it takes: here the first."""
    rest, columns = scores.clone(), []
    for _ in range(count):
        columns.append(rest.argmax(dim=1, keepdim=True))
        rest.scatter_(1, columns[-1], -torch.inf)
    chosen = torch.cat(columns, dim=1)
    return scores.gather(1, chosen), chosen


def _best_right_answers(queries: Side, keys: Side, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Similarity of each query's best right answer (-inf: none), and the first one's place."""
    query, key = _right_pairs(queries.rows, keys.rows)
    parts = [
        (queries.features[q].double() * keys.features[k].double()).sum(dim=1).float()
        for q, k in zip(query.split(chunk_size), key.split(chunk_size), strict=True)
    ]
    scores = torch.cat(parts) if parts else torch.zeros(0)
    best = torch.full((len(queries.rows),), -torch.inf)
    best.scatter_reduce_(0, query, scores, "amax")
    # Places of one row are neighbours: a wrong answer comes before all of them or after.
    first = torch.full((len(queries.rows),), torch.iinfo(torch.int64).max)
    first.scatter_reduce_(0, query, keys.places[key], "amin")
    return best, first


def _right_pairs(query_rows: Tensor, key_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (query, key) of equal rows; images, one of the sides, have each row once."""
    if len(query_rows.unique()) == len(query_rows):
        return _positions(query_rows, key_rows)
    found, there = _positions(key_rows, query_rows)
    return there, found


def _positions(unique: Tensor, repeated: Tensor) -> tuple[Tensor, Tensor]:
    """For each entry of ``repeated`` that is in ``unique``: its position there, and its own."""
    if not len(unique):
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    values, order = unique.sort()
    place = torch.searchsorted(values, repeated).clamp(max=len(values) - 1)
    own = (values[place] == repeated).nonzero().flatten()
    return order[place[own]], own


def all_chunks(side: Side, world: World, chunk_size: int) -> Iterator[Side]:
    """Everything of all ranks, rank after rank, at most ``chunk_size`` at a time, on all ranks.

    One gather of a number; per chunk a broadcast of its features and one of its rows and places.
    """
    counts = gather_objects(len(side.rows), world)
    width = side.features.shape[1]
    for source, count in enumerate(counts):
        for start in range(0, count, chunk_size):
            own = slice(start, min(start + chunk_size, count))
            if world.world_size == 1:
                yield Side(*(part[own] for part in side)).to(world.device)
                continue
            features = torch.empty(own.stop - own.start, width, device=world.device)
            numbers = torch.empty(2, own.stop - own.start, dtype=torch.int64, device=world.device)
            if source == world.rank:
                features.copy_(side.features[own])
                numbers.copy_(torch.stack([side.rows[own], side.places[own]]))
            dist.broadcast(features, source)
            dist.broadcast(numbers, source)
            yield Side(features, *numbers)
