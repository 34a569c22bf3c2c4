"""The parity suite must notice the classic mistakes: each is made here, and must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from loss_cases import Case, failures
from torch import Tensor

from disco_ds.losses import pairwise
from disco_ds.losses.exchange import Exchange
from disco_ds.losses.info_nce import InfoNCE
from disco_ds.losses.softmax import SoftmaxPairs

SIZES = (5, 5)


def cases(reduction: str = "scalar_gather", precision: str = "fp64", **changes: Any) -> list[Case]:
    options = (("gradient_reduction", reduction), ("tile_size", 4))
    values: dict[str, Any] = {"scale": 14.3, "regime": "random", **changes}
    return [Case("disco", options, precision, sizes=SIZES, **values)]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Leave the other ranks' part out: a gather whose backward only slices."""


def _slice_only(self: Exchange, parts: Tensor, rows: int) -> Tensor:
    return parts[self.rank, :rows]


def _averaged(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, parts, rows: method(self, parts, rows) / self.world_size


def _drop_ragged_tile(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length - size + 1, size):
        yield slice(start, start + size)


def _outside(method: Callable[..., None]) -> Callable[..., None]:
    """Weights P + Q in the tile, then minus twice the partner's features outside of it."""

    def add(self: SoftmaxPairs, block: Any, key: Any, *, diagonal: Tensor, **kwargs: Any) -> None:
        method(self, block, key, diagonal=diagonal + 2, **kwargs)
        if block.is_own and kwargs["dx"] is not None:
            kwargs["dx"].sub_(2 * block.y)
        if block.is_own and kwargs["dy"] is not None:
            kwargs["dy"].sub_(2 * block.x)

    return add


def _own_share_only(self: Exchange, parts: Any) -> Tensor:
    return parts[self.rank][None]


MUTATIONS: dict[str, tuple[Any, str, Any, list[Case]]] = {
    "slice-only scalar_gather": (InfoNCE, "_add_transposed", _nothing, cases()),
    "slice-only reduce_scatter": (Exchange, "reduce_scatter", _slice_only, cases("reduce_scatter")),
    "AVG in reduce_scatter": (
        Exchange,
        "reduce_scatter",
        _averaged(Exchange.reduce_scatter),
        cases("reduce_scatter"),
    ),
    "AVG in all_reduce": (
        Exchange,
        "all_reduce",
        _averaged(Exchange.all_reduce),
        cases("all_reduce"),
    ),
    "last tile dropped": (pairwise, "_slices", _drop_ragged_tile, cases()),
    "diagonal outside the tile": (
        SoftmaxPairs,
        "add_gradients_",
        _outside(SoftmaxPairs.add_gradients_),
        cases(precision="fp32", scale=100.0, regime="converged"),
    ),
    "columns of own rank only": (Exchange, "return_columns", _own_share_only, cases()),
}


def mutation_worker(rank: int, world_size: int, name: str) -> None:
    owner, attribute, mutant, suite = MUTATIONS[name]
    assert not failures(suite, rank), "the suite must pass without the mutation"
    with patch.object(owner, attribute, mutant):
        noticed = torch.tensor(len(failures(suite, rank)))
    dist.all_reduce(noticed)
    assert noticed > 0, f"nothing noticed: {name}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name: str) -> None:
    run_distributed(mutation_worker, name, world_size=2)
