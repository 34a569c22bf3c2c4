"""Image-text retrieval over held-out pairs: R@1/5/10 and median rank, both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.evaluation.encode import (
    EvalSample,
    all_gather_rows,
    encode_images,
    encode_tokens,
    lockstep_batches,
)
from disco_ds.strategies.base import Strategy

RECALLS = (1, 5, 10)


def evaluate_retrieval(
    strategy: Strategy,
    samples: Iterable[EvalSample],
    *,
    tokenize: Callable[[list[str]], Tensor],
    image_size: tuple[int, int],
    batch_size: int,
    chunk_size: int = 1024,
) -> dict[str, float]:
    """Recall of images by text and texts by image over all ranks' samples.

    Each sample is an image with one or more captions. A query scores by its best-ranked correct
    answer; equal similarities rank by row. Collective; the result is the same on every rank and
    for every number of ranks. Memory: features of all pairs plus ``chunk_size x N`` similarities.

    Raises:
        ValueError: no sample has a caption.
    """
    world = strategy.world
    rows: list[Tensor] = []
    images, texts, owners = [], [], []
    with strategy.evaluating():
        for batch in lockstep_batches(samples, batch_size, world):
            captions = [caption for sample in batch for caption in sample.captions]
            rows.append(torch.tensor([s.row for s in batch], dtype=torch.int64))
            owners.append(
                torch.tensor([s.row for s in batch for _ in s.captions], dtype=torch.int64)
            )
            images.append(encode_images(strategy, [s.image for s in batch], image_size))
            tokens = tokenize(captions or [""])[: len(captions)]
            texts.append(encode_tokens(strategy, tokens))
    if not rows:
        raise ValueError("the retrieval set is empty")
    image_ids, image_features = _in_row_order(torch.cat(rows), torch.cat(images), world)
    text_ids, text_features = _in_row_order(torch.cat(owners), torch.cat(texts), world)
    if not len(text_ids):
        raise ValueError("no sample of the retrieval set has a caption")
    to_text = best_ranks(image_features, text_features, image_ids, text_ids, chunk_size=chunk_size)
    to_image = best_ranks(text_features, image_features, text_ids, image_ids, chunk_size=chunk_size)
    return {
        **_summary("image_to_text", to_text),
        **_summary("text_to_image", to_image),
        "num_images": float(len(image_ids)),
        "num_texts": float(len(text_ids)),
    }


def best_ranks(
    queries: Tensor, keys: Tensor, query_ids: Tensor, key_ids: Tensor, *, chunk_size: int
) -> Tensor:
    """0-based rank of each query's best relevant key, int64 ``[q]``.

    A key is relevant when its id equals the query's. Keys with a higher similarity come first,
    equal ones in their order. Queries without a relevant key get rank k.
    """
    ranks = [torch.zeros(0, dtype=torch.int64)]
    position = torch.arange(len(keys))
    for start in range(0, len(queries), chunk_size):
        similarity = queries[start : start + chunk_size] @ keys.T
        relevant = query_ids[start : start + chunk_size, None] == key_ids[None, :]
        best = similarity.masked_fill(~relevant, -torch.inf).max(dim=1, keepdim=True).values
        first = ((similarity == best) & relevant).int().argmax(dim=1, keepdim=True)
        ahead = (similarity > best) | ((similarity == best) & (position < first))
        rank = ahead.sum(dim=1)
        rank[~relevant.any(dim=1)] = len(keys)
        ranks.append(rank)
    return torch.cat(ranks)


def _in_row_order(rows: Tensor, features: Tensor, world: World) -> tuple[Tensor, Tensor]:
    all_rows = torch.cat(all_gather_rows(rows, world))
    all_features = torch.cat(all_gather_rows(features, world))
    order = torch.argsort(all_rows, stable=True)
    return all_rows[order], all_features[order]


def _summary(direction: str, ranks: Tensor) -> dict[str, float]:
    result = {f"{direction}_R@{k}": float((ranks < k).double().mean()) for k in RECALLS}
    result[f"{direction}_median_rank"] = float(ranks.double().median()) + 1
    return result
