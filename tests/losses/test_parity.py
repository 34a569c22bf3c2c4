"""Value and every gradient against the float64 reference, on 1 to 4 ranks."""

from __future__ import annotations

import pytest
import torch
from harness import run_distributed
from loss_cases import PRECISIONS, VARIANTS, Case, all_cases, assert_none, failures

LAYOUTS = [(9,), (8, 8), (1, 11), (4, 4, 4), (3, 1, 7), (5, 5, 5, 5), (2, 7, 1, 5)]
ODD_DIMS = (384, 640, 1152, 100, 1)


def parity_worker(rank: int, world_size: int, cases: list[Case]) -> None:
    torch.manual_seed(rank)
    assert_none(failures(cases, rank))


def run(cases: list[Case]) -> None:
    world_size = len(cases[0].sizes)
    if world_size == 1:
        parity_worker(0, 1, cases)
    else:
        run_distributed(parity_worker, cases, world_size=world_size)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(map(str, sizes)))
def test_equals_reference(sizes: tuple[int, ...], precision: str) -> None:
    run(all_cases(sizes, precision, tile_size=4))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_tile(precision: str) -> None:
    """The default: kept tiles, here all of them."""
    run(all_cases((7, 8), precision, tile_size=None))


def test_odd_embedding_sizes() -> None:
    run(
        [
            Case(loss, (*options.items(), ("tile_size", 3)), precision, 14.3, "random", (5, 3), dim)
            for loss, options in VARIANTS
            for precision in PRECISIONS
            for dim in ODD_DIMS
        ]
    )


def test_tiles_larger_than_default_batch() -> None:
    """Several default tiles, some kept and some not, with a ragged last one."""
    sizes = (1100, 900)
    run([Case("disco", (), precision, 14.3, "random", sizes) for precision in ("fp64", "fp32")])
