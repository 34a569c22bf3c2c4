"""What a call accepts, and that a mistake on one rank is an error on every rank."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import run_distributed
from torch import Tensor

from disco_ds.losses import DiscoLoss, SigLIPLoss, reference
from disco_ds.losses.inputs import Header, agree


def test_import_needs_torch_alone() -> None:
    """Of the project's dependencies, and of what torch itself loads lazily."""
    heavy = "{'deepspeed', 'open_clip', 'webdataset', 'triton', 'tyro', 'sympy'}"
    code = f"import sys, disco_ds.losses; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def header(rows: int = 4, dim: int = 8, **changes: Any) -> Header:
    features = torch.zeros(rows, dim)
    return replace(Header.of_call(features, features, 10.0, None, None), **changes)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "dim": ({"dim": 9}, r"rank 1: features are 4 x 9 but rank 0 has 4 x 8"),
    "integer": ({"image_dtype": 4}, r"rank 1: image_features must be floating.*int64"),
    "dtypes": ({"text_dtype": 2}, r"rank 1: text_dtype is torch.bfloat16 but rank 0"),
    "no rows": ({"rows": 0}, r"rank 1: image_features must be \[b, d\].*got 0 x 8"),
    "ndim": ({"text_ndim": 3}, r"rank 1: text_features must be \[b, d\].*3 dimensions"),
    "unpaired": ({"text_rows": 3}, r"rank 1: image_features 4 x 8 and text_features 3 x 8"),
    "nan scale": ({"scale": math.nan}, r"rank 1: logit_scale must be one finite number.*nan"),
    "inf bias": ({"bias": math.inf}, r"rank 1: logit_bias must be one finite number"),
    "other scale": ({"scale": 11.0}, r"rank 1: logit_scale is 11.0 but rank 0 has 10.0"),
    "nan bias": ({"bias": math.nan}, r"rank 1: logit_bias must be one finite number, got nan"),
    "other bias": ({"bias": 1.0}, r"rank 1: logit_bias is 1.0 but rank 0 has 0.0"),
    "some bias": ({"has_bias": 1.0}, r"rank 1: logit_bias is given on some ranks and not"),
    "some index": ({"index_rows": 4}, r"rank 1: index is given on some ranks"),
    "short index": ({"index_rows": 3}, r"rank 1: index must be a vector of 4 integers.*got 3"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named(name: str) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        agree([header(), header(**changes)])


def test_a_bias_that_is_not_a_number_is_refused() -> None:
    features = torch.eye(4)
    with pytest.raises(ValueError, match="rank 0: logit_bias must be one finite number, got nan"):
        SigLIPLoss()(features, features, 10.0, torch.tensor(math.nan))


def test_headers_of_different_batch_sizes_agree() -> None:
    agreed = agree([header(4), header(1), header(7)])
    assert agreed.sizes == (4, 1, 7)
    assert agreed.global_batch_size == 12


def test_a_need_of_one_rank_is_a_need_of_all() -> None:
    agreed = agree([header(), header(need_text=1.0)])
    assert (agreed.need_image, agreed.need_text) == (False, True)


@pytest.mark.parametrize("loss", [DiscoLoss(), SigLIPLoss()], ids=["disco", "siglip"])
def test_single_pair_is_refused(loss: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="at least 2 pairs"):
        loss(torch.ones(1, 4), torch.ones(1, 4), 1.0)


def test_scale_of_two_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="logit_scale must be one finite number"):
        DiscoLoss()(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2))


@pytest.mark.parametrize(
    "options",
    [
        {"gather": "ring", "gradient_reduction": "all_reduce"},
        {"gather": "some"},
        {"gradient_reduction": "mean"},
        {"kernel": "cuda"},
        {"tile_size": 0},
        {"wire_dtype": torch.int8},
        {"positives": "caption"},
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(reversed(options))):
        DiscoLoss(**options)


def mistake_worker(rank: int, world_size: int) -> None:
    good = torch.randn(3, 8)
    bad_calls: dict[str, tuple[Tensor, Tensor, float]] = {
        "embedding size must agree": (torch.randn(3, 9), torch.randn(3, 9), 1.0),
        "rank 1: image_features must be floating point": (good.long(), good, 1.0),
        "rank 1: logit_scale must be one finite": (good, good, math.inf),
    }
    for message, call in bad_calls.items():
        for loss in (DiscoLoss(), DiscoLoss(normalize=True), SigLIPLoss(gather="ring")):
            with pytest.raises(ValueError, match=re.escape(message)):
                loss(*(call if rank == 1 else (good, good, 1.0)))
    # The group still works.
    loss(good, good, 1.0)


def test_mistake_on_one_rank_raises_on_every_rank() -> None:
    run_distributed(mistake_worker, world_size=2)


def _leaves(*dtypes: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    features = [torch.nn.functional.normalize(torch.randn(6, 10), dim=1) for _ in dtypes]
    return [f.to(d).requires_grad_() for f, d in zip(features, dtypes, strict=True)]


def test_mixed_dtypes_get_gradients_of_their_own_dtype() -> None:
    images, texts = _leaves(torch.bfloat16, torch.float16)
    value = DiscoLoss()(images, texts, 10.0)
    value.backward()
    assert value.dtype == torch.float32
    assert (images.grad.dtype, texts.grad.dtype) == (torch.bfloat16, torch.float16)
    exact = reference.info_nce(images.double(), texts.double(), 10.0)
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=0)


def test_loss_scale_reaches_fp16_gradients_before_rounding() -> None:
    images, texts = _leaves(torch.float16, torch.float16)
    tiny = torch.eye(6, 10).half().requires_grad_()
    loss = DiscoLoss()(tiny, tiny.detach(), 16.0) * 2.0**20
    loss.backward()
    assert tiny.grad.abs().max() > 0
    assert images.grad is None
    assert texts.grad is None


def test_non_contiguous_features() -> None:
    images, texts = _leaves(torch.float64, torch.float64)
    wide = torch.stack([images.detach(), texts.detach()], dim=2)  # [6, 10, 2]
    strided = [wide[..., k].requires_grad_() for k in range(2)]
    assert not strided[0].is_contiguous()
    DiscoLoss()(*strided, 10.0).backward()
    DiscoLoss()(images, texts, 10.0).backward()
    torch.testing.assert_close(strided[0].grad, images.grad)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "[1]"])
@pytest.mark.parametrize("make", [DiscoLoss, SigLIPLoss])
def test_scalar_shapes(make: Any, shape: tuple[int, ...]) -> None:
    images, texts = _leaves(torch.float32, torch.float32)
    scale, bias = (torch.full(shape, v, requires_grad=True) for v in (10.0, -2.0))
    value = make()(images, texts, scale, bias)
    value.backward()
    assert value.shape == ()
    assert scale.grad.shape == bias.grad.shape == shape
    assert (bias.grad == 0) == (make is DiscoLoss)


def test_normalize_gives_gradients_of_the_raw_features() -> None:
    torch.manual_seed(0)
    raw = [(3 * torch.randn(6, 10, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    unit = [torch.nn.functional.normalize(features, dim=1) for features in raw]
    want = torch.autograd.grad(reference.info_nce(*unit, 10.0), raw)
    got = torch.autograd.grad(DiscoLoss(normalize=True)(*raw, 10.0), raw)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_normalize_of_large_fp16_features_is_finite() -> None:
    raw = torch.randn(6, 10).half() * 1000
    assert DiscoLoss(normalize=True)(raw, raw, 10.0).isfinite()
