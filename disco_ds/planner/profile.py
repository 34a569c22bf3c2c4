"""What one pair costs in the encoders: lines in the micro-batch size, found from shapes alone.

The encoders run forward and backward on fake tensors, without any engine, for two tiny
micro-batches. The same operators run for every size, and what each of them leaves alive is a
constant plus a multiple of the micro-batch size; two runs give both. The peak for any size is the
highest of these lines, so that a plan costs no run of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from disco_ds.blocks import transformer_blocks
from disco_ds.models import Encoders, ModelConfig
from disco_ds.planner.fake import fake_encoders, fake_world
from disco_ds.planner.meter import MemoryMeter
from disco_ds.planner.uses import UseRecorder, Uses, as_one_call
from disco_ds.strategies.config import Precision
from disco_ds.strategies.plain import LOW_PRECISION

SIZES = (2, 4)


@dataclass(frozen=True)
class Line:
    """``constant + slope * micro-batch size`` bytes."""

    constant: float
    slope: float

    def at(self, size: float) -> float:
        """Its value."""
        return self.constant + self.slope * size


@dataclass(frozen=True)
class Envelope:
    """Moments of a pass: activations as lines, and the gradient bytes that exist by then."""

    moments: tuple[tuple[Line, float], ...]

    def peak(self, size: float, *, gradients: bool = False) -> float:
        """Highest bytes of activations, with or without the gradients made so far."""
        return max(line.at(size) + made * gradients for line, made in self.moments)


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters; a group is no-decay or decay, as the optimizer has them."""

    sizes: tuple[int, ...]
    """Elements of each trainable parameter, in the model's order."""
    is_vector: tuple[bool, ...]
    """Whether it is in the group without decay."""
    all_sizes: tuple[int, ...]
    """Elements of every parameter, frozen ones included."""
    order: tuple[int, ...]
    """In which order gradients arrive (positions in ``sizes``)."""
    frozen: int
    """Elements that do not train."""
    buffers: int
    """Bytes of persistent and other buffers."""
    float_buffers: int
    """Elements of floating-point buffers."""
    units: tuple[tuple[int, ...], ...]
    """FSDP2's units, blocks first and the rest last: (rows, elements per row) flattened, see
    :func:`unit_shapes`."""
    batch_norms: tuple[int, ...]
    """Channels of every BatchNorm."""
    towers: dict[str, int]
    """Trainable elements by tower."""

    @property
    def trainable(self) -> int:
        """Elements that train."""
        return sum(self.sizes)

    @property
    def total(self) -> int:
        """All elements."""
        return self.trainable + self.frozen


@dataclass(frozen=True)
class Profile:
    """Everything that a plan needs to know of a model under one arithmetic."""

    weights: Weights
    uses: Uses
    image_size: tuple[int, int]
    context: int
    dim: int
    """Embedding size."""
    feature_bytes: int
    """Bytes of a feature element as the encoders return it."""
    kept: dict[str, Line]
    """Bytes kept for the backward pass, by tower."""
    forward: Envelope
    """Forward with graph."""
    forward_no_graph: Envelope
    backward: Envelope
    flops: float
    """Forward products of one pair, both towers."""


@functools.lru_cache(maxsize=64)
def profile(
    model: ModelConfig,
    precision: Precision,
    *,
    autocast: bool,
    module_hooks: bool = False,
    like_cuda: bool = True,
) -> Profile:
    """Profile a model.

    Args:
        model: name, checkpointing and locks.
        precision: arithmetic of the encoders.
        autocast: weights are fp32 and cast per operation; otherwise they have the low precision.
        module_hooks: ZeRO stage 3 sends inputs and outputs of every module through functions of
            its own, and they stay alive longer for it.
        like_cuda: see :func:`disco_ds.planner.trace.trace`.

    Raises:
        ValueError: open_clip has no such model.
    """
    if model.batch_norm == "synced":  # there are no other ranks here
        model = replace(model, batch_norm="local")
    how = (precision, autocast, module_hooks, like_cuda)
    runs = [_Run(model, *how, size) for size in SIZES]
    first, second = runs
    return Profile(
        weights=first.weights,
        uses=first.uses,
        image_size=first.image_size,
        context=first.context,
        dim=first.dim,
        feature_bytes=first.feature_bytes,
        kept={name: _line(first.kept[name], second.kept[name]) for name in ("image", "text")},
        forward=_envelope(first.forward, second.forward),
        forward_no_graph=_envelope(first.no_graph, second.no_graph),
        backward=_envelope(first.backward, second.backward),
        flops=_flops(model),
    )


def _line(small: float, large: float) -> Line:
    slope = (large - small) / (SIZES[1] - SIZES[0])
    return Line(small - slope * SIZES[0], slope)


def _envelope(small: list[tuple[int, int]], large: list[tuple[int, int]]) -> Envelope:
    if len(small) != len(large):
        raise RuntimeError("the encoders run other operators for another micro-batch size")
    moments = {(_line(a, b), float(made)) for (a, made), (b, _) in zip(small, large, strict=True)}
    return Envelope(tuple(_highest(moments)))


def _highest(moments: set[tuple[Line, float]]) -> list[tuple[Line, float]]:
    """Leave out moments that another one exceeds whatever the size."""
    ordered = sorted(moments, key=lambda m: (-m[0].slope, -m[0].constant, -m[1]))
    kept: list[tuple[Line, float]] = []
    for line, made in ordered:
        if not any(k.constant >= line.constant and m >= made for k, m in kept):
            kept.append((line, made))
    return kept


class _Run:
    """One forward, one without graph, and one backward, at one micro-batch size."""

    def __init__(
        self,
        model: ModelConfig,
        precision: Precision,
        autocast: bool,
        module_hooks: bool,
        like_cuda: bool,
        size: int,
    ) -> None:
        with fake_world(None, like_cuda=like_cuda):
            encoders, self.image_size, self.context = fake_encoders(model)
            with MemoryMeter() as meter:
                self._measure(encoders, precision, autocast, module_hooks, size, meter)

    def _measure(
        self,
        encoders: Encoders,
        precision: Precision,
        autocast: bool,
        module_hooks: bool,
        size: int,
        meter: MemoryMeter,
    ) -> None:
        self.weights = describe_weights(encoders)
        if precision != "fp32" and not autocast:
            encoders.to(LOW_PRECISION[precision])
        meter.mark(encoders.parameters(), "parameters")
        meter.mark(encoders.buffers(), "parameters")
        image = torch.empty(size, 3, *self.image_size)
        text = torch.zeros(size, self.context, dtype=torch.long)
        meter.mark([image, text], "inputs")
        recorder = UseRecorder(encoders) if module_hooks else None
        base = meter.total
        order: list[int] = []
        trainable = [p for p in encoders.parameters() if p.requires_grad]
        for number, parameter in enumerate(trainable):
            parameter.register_post_accumulate_grad_hook(_arrived(number, order, meter))

        def arithmetic() -> AbstractContextManager[object]:
            if precision == "fp32" or not autocast:
                return nullcontext()
            return torch.autocast("cpu", dtype=LOW_PRECISION[precision])

        def since(curve: list[tuple[int, int]]) -> list[tuple[int, int]]:
            return [(live - base, made) for live, made in curve]

        with _recording(meter) as curve, torch.no_grad(), arithmetic():
            encoders(image, text)
        self.no_graph = since(curve)
        forward = recorder.take() if recorder else ()
        with _recording(meter) as curve, arithmetic():
            image_features, _ = encoders(image, None)
            kept_image = meter.total - base
            _, text_features = encoders(None, text)
        self.forward = since(curve)
        kept = meter.total - base
        assert image_features is not None and text_features is not None
        self.kept = {"image": kept_image, "text": kept - kept_image}
        self.dim, self.feature_bytes = image_features.shape[1], image_features.element_size()
        gradients = [torch.empty_like(f) for f in (image_features, text_features)]
        features = [image_features, text_features]
        del image_features, text_features
        pairs = [(f, g) for f, g in zip(features, gradients, strict=True) if f.requires_grad]
        del features, gradients
        outputs, given = zip(*pairs, strict=True)
        del pairs
        with _recording(meter) as curve:
            torch.autograd.backward(list(outputs), list(given))
        self.backward = since(curve)
        self.uses = (
            Uses(recorder.parameters(), forward, as_one_call(recorder.take()))
            if recorder
            else Uses()
        )
        self.weights = _ordered(self.weights, order)


def _arrived(number: int, order: list[int], meter: MemoryMeter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        order.append(number)
        assert parameter.grad is not None
        meter.mark([parameter.grad], "gradients")

    return hook


@contextmanager
def _recording(meter: MemoryMeter) -> Iterator[list[tuple[int, int]]]:
    curve: list[tuple[int, int]] = []
    meter.curve = curve
    meter._look()
    try:
        yield curve
    finally:
        meter.curve = None


def describe_weights(encoders: Encoders) -> Weights:
    """Count, before any engine has cut anything."""
    parameters = list(encoders.named_parameters())
    trainable = [p for _, p in parameters if p.requires_grad]
    buffers = list(encoders.buffers())
    in_image = sum(p.numel() for n, p in parameters if ".visual." in n and p.requires_grad)
    total = sum(p.numel() for p in trainable)
    return Weights(
        sizes=tuple(p.numel() for p in trainable),
        is_vector=tuple(p.ndim < 2 for p in trainable),
        all_sizes=tuple(p.numel() for _, p in parameters),
        order=tuple(range(len(trainable))),
        frozen=sum(p.numel() for _, p in parameters if not p.requires_grad),
        buffers=sum(b.numel() * b.element_size() for b in buffers),
        float_buffers=sum(b.numel() for b in buffers if b.is_floating_point()),
        units=tuple(unit_shapes(encoders)),
        batch_norms=tuple(
            m.num_features for m in encoders.modules() if isinstance(m, nn.BatchNorm2d)
        ),
        towers={"image": in_image, "text": total - in_image},
    )


def unit_shapes(encoders: nn.Module) -> Iterator[tuple[int, ...]]:
    """Per FSDP2 unit: leading size and elements per row of every parameter, alternating."""
    seen: set[int] = set()
    for block in [*transformer_blocks(encoders), encoders]:
        shape: list[int] = []
        for parameter in block.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                rows = parameter.shape[0] if parameter.ndim else 1
                shape += [rows, parameter.numel() // rows]
        yield tuple(shape)


def _ordered(weights: Weights, order: list[int]) -> Weights:
    return replace(weights, order=tuple(order))


def _flops(model: ModelConfig) -> float:
    """Products (2 per multiply-add) of a forward of both towers, for one pair."""
    from torch.utils.flop_counter import FlopCounterMode

    with fake_world(None, like_cuda=False):
        encoders, image_size, context = fake_encoders(model)
        encoders.requires_grad_(False)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            encoders(torch.empty(2, 3, *image_size), torch.zeros(2, context, dtype=torch.long))
    return float(counter.get_total_flops()) / 2
