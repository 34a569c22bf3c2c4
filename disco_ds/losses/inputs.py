"""What a call of a loss looks like on each rank, and whether the ranks fit together.

Every rank sends the same short row of numbers before any feature travels. All ranks then judge all
rows by the same pure function, so a mistake on one rank is the same error on every rank instead of
a hang in the next collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Position is what travels; only the first four are accepted.
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)
FLOAT_DTYPES = DTYPES[:4]


@dataclass(frozen=True)
class Header:
    """One rank's call in numbers; -1 stands for absent or unknown."""

    image_ndim: float
    image_rows: float
    image_dim: float
    image_dtype: float
    text_ndim: float
    text_rows: float
    text_dim: float
    text_dtype: float
    scale: float
    has_bias: float
    bias: float
    index_rows: float
    need_image: float
    need_text: float
    need_scalars: float

    @classmethod
    def of_call(
        cls,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None,
        index: Tensor | None,
    ) -> Header:
        """Describe this rank's arguments; accepts anything, judges nothing."""
        enabled = torch.is_grad_enabled()
        scalars = [s for s in (logit_scale, logit_bias) if isinstance(s, Tensor)]
        index_ok = index is None or (index.ndim == 1 and not index.is_floating_point())
        return cls(
            *_describe(image_features),
            *_describe(text_features),
            scale=_number(logit_scale),
            has_bias=logit_bias is not None,
            bias=0.0 if logit_bias is None else _number(logit_bias),
            index_rows=-1 if index is None else len(index) if index_ok else -2,
            need_image=enabled and image_features.requires_grad,
            need_text=enabled and text_features.requires_grad,
            need_scalars=enabled and any(scalar.requires_grad for scalar in scalars),
        )

    def row(self) -> list[float]:
        """Return the numbers that travel."""
        return [float(value) for value in astuple(self)]

    @classmethod
    def length(cls) -> int:
        """Count the numbers that travel."""
        return len(fields(cls))


@dataclass(frozen=True)
class Agreement:
    """The call as all ranks see it, after :func:`agree` found nothing wrong.

    ``sizes[k]`` is the number of pairs of rank k and ``global_batch_size`` their sum.
    ``scale`` and ``bias`` are rank 0's. ``compute_dtype`` is float64 when a feature is, float32
    otherwise. Needs are those of any rank: the collectives of a call must not depend on what one
    rank alone wants.
    """

    sizes: tuple[int, ...]
    dim: int
    scale: float
    bias: float
    compute_dtype: torch.dtype
    need_image: bool
    need_text: bool
    need_scalars: bool

    @property
    def global_batch_size(self) -> int:
        """Pairs on all ranks together."""
        return sum(self.sizes)


def has_values(tensor: Tensor) -> bool:
    """Tell whether numbers can be read; a planner's trace has shapes only."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def agree(headers: Sequence[Header]) -> Agreement:
    """Check one header per rank and return what they agree on.

    Raises:
        ValueError: naming the rank and the shape, dtype or value that does not fit.
    """
    for rank, header in enumerate(headers):
        _check_features(rank, header)
        _check_scalars(rank, header)
    for rank, header in enumerate(headers):
        _check_same(rank, header, headers[0])
    sizes = tuple(int(header.image_rows) for header in headers)
    if sum(sizes) < 2:
        raise ValueError(
            "a contrastive loss needs at least 2 pairs in the global batch: a single pair has no "
            "negatives, so its loss is 0 whatever the model does"
        )
    first = headers[0]
    is_double = torch.float64 in (DTYPES[int(first.image_dtype)], DTYPES[int(first.text_dtype)])
    return Agreement(
        sizes=sizes,
        dim=int(first.image_dim),
        scale=first.scale,
        bias=first.bias,
        compute_dtype=torch.float64 if is_double else torch.float32,
        need_image=any(header.need_image for header in headers),
        need_text=any(header.need_text for header in headers),
        need_scalars=any(header.need_scalars for header in headers),
    )


def duplicate_rate(index: Tensor) -> float:
    """Share of the samples of a global batch ([B] ids) that share their id with another one."""
    counts = torch.unique(index, return_counts=True)[1]
    return float(counts[counts > 1].sum()) / len(index)


def _describe(features: Tensor) -> tuple[float, float, float, float]:
    dtype = DTYPES.index(features.dtype) if features.dtype in DTYPES else -1
    rows, dim = features.shape if features.ndim == 2 else (-1, -1)
    return features.ndim, rows, dim, dtype


def _number(value: Tensor | float) -> float:
    """Return the value; infinity for a tensor that is not one number, to be refused later."""
    if isinstance(value, Tensor):
        if not has_values(value):
            return 1.0
        return float(value.detach().reshape(())) if value.numel() == 1 else math.inf
    return float(value)


def _check_features(rank: int, header: Header) -> None:
    image = (header.image_ndim, header.image_rows, header.image_dim, header.image_dtype)
    text = (header.text_ndim, header.text_rows, header.text_dim, header.text_dtype)
    for name, (ndim, rows, dim, dtype) in (("image", image), ("text", text)):
        if ndim != 2 or rows < 1 or dim < 1:
            shape = f"{rows:.0f} x {dim:.0f}" if ndim == 2 else f"{ndim:.0f} dimensions"
            raise ValueError(
                f"rank {rank}: {name}_features must be [b, d] with b and d of at least 1, "
                f"got {shape}"
            )
        if not 0 <= dtype < len(FLOAT_DTYPES):
            known = str(DTYPES[int(dtype)]) if dtype >= 0 else "an unknown dtype"
            raise ValueError(f"rank {rank}: {name}_features must be floating point, got {known}")
    if image[1:3] != text[1:3]:
        raise ValueError(
            f"rank {rank}: image_features {image[1]:.0f} x {image[2]:.0f} and text_features "
            f"{text[1]:.0f} x {text[2]:.0f} must have the same shape: row i of both is a pair"
        )
    if header.index_rows not in (-1, image[1]):
        raise ValueError(
            f"rank {rank}: index must be a vector of {image[1]:.0f} integers, one per pair"
            + (f", got {header.index_rows:.0f}" if header.index_rows >= 0 else "")
        )


def _check_scalars(rank: int, header: Header) -> None:
    if not math.isfinite(header.scale):
        raise ValueError(
            f"rank {rank}: logit_scale must be one finite number (linear, 0-D or [1]), "
            f"got {header.scale}"
        )
    if not math.isfinite(header.bias):
        raise ValueError(f"rank {rank}: logit_bias must be one finite number, got {header.bias}")


def _check_same(rank: int, header: Header, first: Header) -> None:
    if header.image_dim != first.image_dim:
        raise ValueError(
            f"rank {rank}: features are {header.image_rows:.0f} x {header.image_dim:.0f} but rank "
            f"0 has {first.image_rows:.0f} x {first.image_dim:.0f}: the embedding size must agree"
        )
    for name in ("image_dtype", "text_dtype"):
        mine, other = (DTYPES[int(getattr(h, name))] for h in (header, first))
        if mine != other:
            raise ValueError(f"rank {rank}: {name} is {mine} but rank 0 has {other}")
    if (header.index_rows < 0) != (first.index_rows < 0):
        raise ValueError(f"rank {rank}: index is given on some ranks and not on others")
    if header.has_bias != first.has_bias:
        raise ValueError(f"rank {rank}: logit_bias is given on some ranks and not on others")
    for name in ("scale", "bias"):
        mine, other = getattr(header, name), getattr(first, name)
        if not _close(mine, other):
            raise ValueError(
                f"rank {rank}: logit_{name} is {mine} but rank 0 has {other}: the replicas have "
                "drifted apart"
            )


def _close(mine: float, other: float) -> bool:
    """Allow for the rounding of exp() on another kind of device; rank 0's value is used."""
    return math.isclose(mine, other, rel_tol=1e-5, abs_tol=1e-6)
