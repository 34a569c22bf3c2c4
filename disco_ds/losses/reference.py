"""The losses as plain single-process functions: what every fast path must equal.

Shapes: ``B`` pairs, ``d`` embedding size. Any float dtype; tests use float64. Autograd gives the
gradients and nothing is tiled: memory is a few ``B x B`` matrices. Do not train with these.
"""

from __future__ import annotations

import torch
from torch import Tensor


def info_nce(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    index: Tensor | None = None,
) -> Tensor:
    """Symmetric InfoNCE, ``(1/2B) sum_i [-log softmax_row(S)_ii - log softmax_column(S)_ii]``.

    Written over the negatives, ``-log softmax(s)_i = log(1 + exp(lse_{j != i} s_j - s_i))``, which
    keeps its relative accuracy near convergence. Pairs that share an ``index`` ([B]) are left out.
    """
    logits = logit_scale * image_features @ text_features.T  # [B, B]
    excluded = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    if index is not None:
        excluded = excluded | (index[:, None] == index[None, :])
    negatives = logits.masked_fill(excluded, float("-inf"))
    positives = logits.diagonal()
    zero = torch.zeros_like(positives)
    image_to_text = torch.logaddexp(negatives.logsumexp(1) - positives, zero)
    text_to_image = torch.logaddexp(negatives.logsumexp(0) - positives, zero)
    return (image_to_text + text_to_image).mean() / 2


def siglip(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float = 0.0,
) -> Tensor:
    """SigLIP, ``-(1/B) sum_ij log sigmoid(y_ij z_ij)`` with ``y_ii = 1`` and ``-1`` elsewhere."""
    logits = logit_scale * image_features @ text_features.T + logit_bias  # [B, B]
    signs = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
    return -torch.nn.functional.logsigmoid(signs * logits).sum() / len(logits)
