"""The references against the field's own code, and the losses against open_clip's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import run_distributed
from loss_cases import BIAS, batch
from open_clip.loss import ClipLoss, SigLipLoss
from torch import Tensor
from torch.nn.functional import cross_entropy

from disco_ds.losses import DiscoLoss, SigLIPLoss, reference


def test_info_nce_is_the_mean_of_two_cross_entropies() -> None:
    images, texts = batch("random", 10, 8)
    logits = 14.3 * images @ texts.T
    labels = torch.arange(10)
    expected = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
    torch.testing.assert_close(reference.info_nce(images, texts, 14.3), expected)


def test_siglip_by_hand() -> None:
    images, texts = batch("random", 3, 8)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            z = 10.0 * images[i] @ texts[j] + BIAS
            total += torch.log1p(torch.exp(-z if i == j else z))
    torch.testing.assert_close(reference.siglip(images, texts, 10.0, BIAS), total / 3)


def _gradients(loss: torch.nn.Module, rank: int, pairs: int, bias: bool) -> list[Tensor]:
    images, texts = (t[rank * pairs : (rank + 1) * pairs] for t in batch("random", 2 * pairs, 16))
    leaves = [t.clone().requires_grad_() for t in (images, texts)]
    leaves.append(torch.tensor(14.3, dtype=torch.float64, requires_grad=True))
    if bias:
        leaves.append(torch.tensor(BIAS, dtype=torch.float64, requires_grad=True))
    loss(*leaves).backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for scalar in gradients[2:]:
        dist.all_reduce(scalar)
    return gradients


def open_clip_worker(rank: int, world_size: int) -> None:
    ranks = {"rank": rank, "world_size": world_size}
    pairs = (
        (DiscoLoss(), ClipLoss(local_loss=True, gather_with_grad=True, **ranks), False),
        (SigLIPLoss(), SigLipLoss(**ranks), True),
        (SigLIPLoss(gather="ring"), SigLipLoss(dist_impl="gather", **ranks), True),
    )
    for ours, theirs, bias in pairs:
        got, want = (_gradients(loss, rank, 6, bias) for loss in (ours, theirs))
        for mine, other in zip(got, want, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-13)


def test_same_gradients_as_open_clip_under_a_mean_over_ranks() -> None:
    run_distributed(open_clip_worker, world_size=2)
