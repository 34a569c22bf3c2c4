"""positives="index": pairs of equal index are not negatives, wherever they are."""

from __future__ import annotations

import math

import pytest
import torch
from harness import run_distributed
from loss_cases import batch

from disco_ds.losses import DiscoLoss, reference

# Pairs 1 and 5 share a caption, on different ranks; so do 2, 3 and 6.
INDEX = torch.tensor([10, 11, 12, 12, 14, 11, 12, 17])


def by_hand(images: torch.Tensor, texts: torch.Tensor, scale: float) -> float:
    """Cross-entropies written out with sums over what is left of each row and column."""
    logits = (scale * images @ texts.T).detach().tolist()
    total, pairs = 0.0, len(logits)
    for i in range(pairs):
        kept = [j for j in range(pairs) if j == i or INDEX[j] != INDEX[i]]
        total += math.log(sum(math.exp(logits[i][j]) for j in kept)) - logits[i][i]
        total += math.log(sum(math.exp(logits[j][i]) for j in kept)) - logits[i][i]
    return total / (2 * pairs)


def positives_worker(rank: int, world_size: int, sizes: tuple[int, ...]) -> None:
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    full = [f.clone().requires_grad_() for f in batch("random", len(INDEX), 16)]
    value = reference.info_nce(*full, 14.3, index=INDEX)
    assert value.item() == pytest.approx(by_hand(*full, 14.3), abs=1e-13)
    want = torch.autograd.grad(value, full)
    variants = (
        {},
        {"tile_size": 3},
        {"gather": "ring"},
        {"gradient_reduction": "reduce_scatter"},
    )
    for options in variants:
        loss = DiscoLoss(positives="index", **options)
        own = [f.detach()[rows].clone().requires_grad_() for f in full]
        got = loss(*own, 14.3, index=INDEX[rows])
        torch.testing.assert_close(got, value.detach(), rtol=0, atol=1e-13)
        got.backward()
        for leaf, gradient in zip(own, want, strict=True):
            torch.testing.assert_close(leaf.grad / world_size, gradient[rows], rtol=0, atol=1e-12)
        assert loss.metrics()["duplicate_rate"] == 5 / 8


@pytest.mark.parametrize("sizes", [(8,), (4, 4), (2, 1, 4, 1)], ids=str)
def test_equals_one_process_by_hand(sizes: tuple[int, ...]) -> None:
    if len(sizes) == 1:
        positives_worker(0, 1, sizes)
    else:
        run_distributed(positives_worker, sizes, world_size=len(sizes))


def test_default_ignores_the_index() -> None:
    images, texts = batch("random", len(INDEX), 16)
    loss = DiscoLoss()
    assert torch.equal(loss(images, texts, 14.3, index=INDEX), loss(images, texts, 14.3))
    assert "duplicate_rate" not in loss.metrics()


def test_unique_index_changes_nothing() -> None:
    images, texts = batch("random", 8, 16)
    loss = DiscoLoss(positives="index")
    got = loss(images, texts, 14.3, index=torch.arange(8))
    assert torch.equal(got, DiscoLoss()(images, texts, 14.3))
    assert loss.metrics()["duplicate_rate"] == 0


def test_all_pairs_equal_have_no_negatives_and_no_loss() -> None:
    images, texts = (f.clone().requires_grad_() for f in batch("random", 8, 16))
    value = DiscoLoss(positives="index")(images, texts, 14.3, index=torch.zeros(8).long())
    value.backward()
    assert value == 0
    assert not images.grad.any()


def test_far_apart_logits_with_excluded_pairs_stay_finite() -> None:
    """A row without a negative in a tile, whose log-sum-exp is far below the tile's maximum."""
    images, texts = (f.float().requires_grad_() for f in batch("opposite", 8, 16))
    index = torch.tensor([0, 0, 0, 3, 4, 5, 6, 7])
    DiscoLoss(positives="index", tile_size=1)(images, texts, 100.0, index=index).backward()
    assert images.grad.isfinite().all()


def test_missing_index_is_an_error() -> None:
    images, texts = batch("random", 8, 16)
    with pytest.raises(ValueError, match="needs index"):
        DiscoLoss(positives="index")(images, texts, 14.3)
