"""Blocks of other ranks in a loss: a trace works on the first of a kind and repeats its results.

A loss walks over one block of features per rank. Blocks of equal shape run the same operators and
allocate the same, so that the time of a trace would grow with the ranks and show nothing new. What
lasts is made for every block: results, tiles that are kept, and tiles that are given back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from disco_ds.losses import sigmoid, softmax
from disco_ds.losses.pairwise import Block, Tile
from disco_ds.losses.pairwise import _slices as slices

# Rank 0's blocks are its own, then W - 1 down to 1; more lasting results lie there by the last.
LAST_RANK = 1


class Repeats:
    """Which kinds of blocks have been worked on, in one call of a loss."""

    def __init__(self) -> None:
        self._engine: Callable[[], object] = lambda: None
        self._kinds: set[tuple[Any, ...]] = set()

    def is_new(self, engine: object, *kind: Any) -> bool:
        """Whether ``engine``, one per call of a loss, meets this kind for the first time."""
        if engine is not self._engine():
            self._engine = weakref.ref(engine)  # it holds the buffers of the tiles
            self._kinds.clear()
        known = kind in self._kinds
        self._kinds.add(kind)
        return not known


def repeating() -> Iterable[tuple[Any, str, Any]]:
    """Replacements of the passes over a block: (owner, attribute, stand-in)."""
    repeats = Repeats()
    sums, softmax_gradients = softmax.SoftmaxPairs.logsumexps, softmax.SoftmaxPairs.add_gradients_
    sigmoid_gradients = sigmoid.SigmoidPairs.add_gradients_

    def logsumexps(pairs: softmax.SoftmaxPairs, block: Block, key: int) -> tuple[Tensor, Tensor]:
        is_kept = pairs.cache.budget_bytes >= _tile_bytes(pairs, block)
        new = repeats.is_new(pairs.engine, "logsumexps", _kind(block), is_kept)
        if new or key == LAST_RANK:
            return sums(pairs, block, key)
        if is_kept:
            _keep(pairs, block, key)
        rows, columns = len(block.x), len(block.y)
        return torch.empty(rows, dtype=torch.float64), torch.empty(columns, dtype=torch.float64)

    def add_softmax_(
        pairs: softmax.SoftmaxPairs, block: Block, key: int | None, **arguments: Any
    ) -> None:
        kept = [place for place in pairs.cache._kept if place[0] == key]
        if repeats.is_new(pairs.engine, "softmax", _kind(block), bool(kept), _wanted(arguments)):
            softmax_gradients(pairs, block, key, **arguments)
        for place in kept:
            pairs.cache._kept.pop(place, None)

    def add_sigmoid_(pairs: sigmoid.SigmoidPairs, block: Block, **arguments: Any) -> None:
        if repeats.is_new(pairs.engine, "sigmoid", _kind(block), _wanted(arguments)):
            sigmoid_gradients(pairs, block, **arguments)

    yield softmax.SoftmaxPairs, "logsumexps", logsumexps
    yield softmax.SoftmaxPairs, "add_gradients_", add_softmax_
    yield sigmoid.SigmoidPairs, "add_gradients_", add_sigmoid_


def _keep(pairs: softmax.SoftmaxPairs, block: Block, key: int) -> None:
    """Keep the block's tiles, as far as there is room, without what is computed on them."""
    size = pairs.engine.tile_size
    for rows in slices(len(block.x), size):
        for columns in slices(len(block.y), size):
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            values = softmax.NegativeTile(pairs.engine.buffer(0, shape), 0.0)
            tile = Tile(rows, columns, block.x, block.y, is_own=False, excluded=None)
            pairs.cache.keep(key, tile, values)


def _kind(block: Block) -> tuple[Any, ...]:
    features = (block.x.shape, block.x.dtype, block.y.shape, block.y.dtype)
    return *features, block.is_own, block.row_index is None


def _wanted(arguments: dict[str, Any]) -> tuple[bool, ...]:
    return tuple(arguments.get(name) is None for name in ("dx", "dy", "sums"))


def _tile_bytes(pairs: softmax.SoftmaxPairs, block: Block) -> int:
    """Bytes of the block's largest tile."""
    size = pairs.engine.tile_size
    rows, columns = min(size, len(block.x)), min(size, len(block.y))
    return rows * columns * pairs.engine.dtype.itemsize
