"""The training step: encode, loss on detached features, gradients back through the encoders.

With one micro-batch the encoder graph is kept. With several, the first pass encodes without
gradients, the loss sees the whole local batch at once, and the second pass repeats each
micro-batch with its own random state and sends the recorded feature gradients back (GradCache,
arXiv 2101.06983). The result is the gradient of the full global batch, for any number of
micro-batches, at the price of one more forward of the encoders.

Gradient scale: the loss hands out ``W x d(global loss)/d(feature)`` on each of W ranks and the
strategy averages over ranks, so parameter gradients are those of one process with all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disco_ds.distributed import World
from disco_ds.losses.base import ContrastiveLoss
from disco_ds.losses.inputs import has_values
from disco_ds.models import Temperature


@dataclass(frozen=True)
class Pairs:
    """One rank's batch on its device: images ``[b, 3, S, S]``, tokens ``[b, L]``, ids ``[b]``."""

    image: Tensor
    text: Tensor
    index: Tensor

    def to(self, device: torch.device) -> Pairs:
        """The same on a device: nothing is copied that is there."""
        return Pairs(self.image.to(device), self.text.to(device), self.index.to(device))

    def split(self, sizes: Sequence[int]) -> list[Pairs]:
        """Consecutive micro-batches of these sizes."""
        columns = [column.split(list(sizes)) for column in (self.image, self.text, self.index)]
        return [Pairs(*part) for part in zip(*columns, strict=True)]


def micro_batch_sizes(num_pairs: int, micro_batch_size: int, world: World) -> list[int]:
    """How a rank divides its pairs, into as many micro-batches as every other rank.

    Full micro-batches and a smaller last one for what is left over. A rank that would have fewer
    micro-batches than another one divides its pairs evenly instead: sharded engines wait for ever
    when ranks differ in their number of forwards. One all-reduce of two numbers.

    Raises:
        ValueError: on all ranks, when a rank has fewer pairs than another one has micro-batches.
    """
    count, fewest = -(-num_pairs // micro_batch_size), num_pairs
    if world.world_size > 1:
        shared = torch.tensor([count, -num_pairs], device=world.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        if has_values(shared):
            count, fewest = int(shared[0]), -int(shared[1])
    if fewest < count:
        raise ValueError(
            f"{count} micro-batches on one rank, but only {fewest} pairs on another: give every "
            "rank the same number of pairs, or raise micro_batch_size"
        )
    if count == -(-num_pairs // micro_batch_size):
        return _full_and_rest(num_pairs, micro_batch_size)
    return [(num_pairs + part) // count for part in range(count)]


def _full_and_rest(num_pairs: int, micro_batch_size: int) -> list[int]:
    full, rest = divmod(num_pairs, micro_batch_size)
    return [micro_batch_size] * full + [rest] * (rest > 0)


class Engine(Protocol):
    """What the step needs: a strategy, or a model adopted from somebody else's loop."""

    @property
    def world(self) -> World:
        """This process."""
        ...

    @property
    def module(self) -> nn.Module:
        """The encoders."""
        ...

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """See :class:`~disco_ds.strategies.base.Strategy`."""
        ...

    def accumulate(self) -> AbstractContextManager[None]:
        """See :class:`~disco_ds.strategies.base.Strategy`."""
        ...

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """See :class:`~disco_ds.strategies.base.Strategy`."""
        ...

    def backward(self, surrogate: Tensor) -> None:
        """See :class:`~disco_ds.strategies.base.Strategy`."""
        ...


class NonFiniteLoss(ArithmeticError):
    """The loss of the global batch is not finite; raised on all ranks before any backward.

    ``tensors`` names what is not finite on this rank; the text is the same on all ranks.
    """

    def __init__(self, value: float, tensors: list[str]) -> None:
        super().__init__(f"the loss is {value}")
        self.tensors = tensors


def contrastive_backward(
    strategy: Engine,
    loss: ContrastiveLoss,
    temperature: Temperature,
    pairs: Pairs,
    *,
    micro_batch_size: int,
    equal_ranks: bool = False,
) -> Tensor:
    """Loss of the global batch and the gradients of encoders and temperature.

    Encoder gradients are left with the strategy (reduced), the temperature's in ``.grad`` as
    this rank's share (its mean over ranks is exact). Collective; ranks may hold different numbers
    of pairs, see :func:`micro_batch_sizes`. ``equal_ranks`` says that they never do, and saves the
    collective in which they agree on their micro-batches.

    Returns:
        the detached global loss, 0-D fp32, the same number on all ranks.

    Raises:
        NonFiniteLoss: on all ranks; no gradient has been added anywhere.
        ValueError: ``micro_batch_size`` below 1, or both towers are locked: nothing to train.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size {micro_batch_size}: must be at least 1")
    pairs = pairs.to(strategy.world.device)
    num_pairs = len(pairs.index)
    if equal_ranks:
        sizes = _full_and_rest(num_pairs, micro_batch_size)
    else:
        sizes = micro_batch_sizes(num_pairs, micro_batch_size, strategy.world)
    if len(sizes) == 1:
        features = _encode(strategy, pairs)
        value, gradients = _loss_gradients(loss, temperature, features, pairs.index)
        with strategy.accumulate(), strategy.micro_batch(is_last=True):
            strategy.backward(_surrogate(features, gradients))
        return value
    parts = pairs.split(sizes)
    features, random_states = _encode_without_graph(strategy, parts)
    value, gradients = _loss_gradients(loss, temperature, features, pairs.index)
    after = RandomState.capture(pairs.image.device)
    shares = list(zip(*(gradient.split(sizes) for gradient in gradients), strict=True))
    with strategy.accumulate():
        for part, state, share in zip(parts, random_states, shares, strict=True):
            state.restore()
            with strategy.micro_batch(is_last=part is parts[-1]):
                strategy.backward(_surrogate(_encode(strategy, part), share))
    after.restore()
    return value


Features = tuple[Tensor, Tensor]


def _encode(strategy: Engine, pairs: Pairs) -> Features:
    image_features, text_features = strategy.encode(pairs.image, pairs.text)
    assert image_features is not None and text_features is not None
    return image_features, text_features


def _encode_without_graph(
    strategy: Engine, parts: list[Pairs]
) -> tuple[Features, list[RandomState]]:
    """First pass: all features of the local batch, and the random state before each part."""
    states, features = [], []
    with torch.no_grad(), frozen_running_statistics(strategy.module):
        for part in parts:
            states.append(RandomState.capture(part.image.device))
            features.append(_encode(strategy, part))
    image_features, text_features = (torch.cat(rows) for rows in zip(*features, strict=True))
    return (image_features, text_features), states


def _loss_gradients(
    loss: ContrastiveLoss, temperature: Temperature, features: Features, index: Tensor
) -> tuple[Tensor, Features]:
    """Loss value and the gradients of image and text features, fp32 ``[b, d]`` each."""
    leaves = [_full_precision(part.detach()).requires_grad_() for part in features]
    scale, bias = temperature()
    with torch.autocast(leaves[0].device.type, enabled=False):
        value = loss(leaves[0], leaves[1], scale, bias, index=index)
        _check_finite(float(value.detach()), {"image": leaves[0], "text": leaves[1]})
        value.backward()
    assert leaves[0].grad is not None and leaves[1].grad is not None
    return value.detach(), (leaves[0].grad, leaves[1].grad)


def _check_finite(value: float, features: dict[str, Tensor]) -> None:
    if not math.isfinite(value):
        broken = [f"{name} features" for name, t in features.items() if not t.isfinite().all()]
        raise NonFiniteLoss(value, broken)


def _surrogate(features: Features, gradients: Features) -> Tensor:
    """A scalar whose gradient w.r.t. the features is the recorded one (locked towers left out)."""
    products = [
        (_full_precision(part) * gradient).sum()
        for part, gradient in zip(features, gradients, strict=True)
        if part.requires_grad
    ]
    if not products:
        raise ValueError("no feature requires a gradient: both towers are locked, nothing to train")
    return torch.stack(products).sum()


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@dataclass(frozen=True)
class RandomState:
    """State of the CPU generator and of the device's, if it has its own."""

    cpu: Tensor
    cuda: Tensor | None
    device: torch.device

    def to_plain(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"cpu": self.cpu} | ({} if self.cuda is None else {"cuda": self.cuda})

    @classmethod
    def from_plain(cls, state: Mapping[str, Tensor], device: torch.device) -> RandomState:
        """The inverse of :meth:`to_plain`."""
        return cls(state["cpu"], state.get("cuda"), device)

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """The state as it is now."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), cuda, device)

    def restore(self) -> None:
        """Make the generators continue from here."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


@contextmanager
def frozen_running_statistics(module: nn.Module) -> Iterator[None]:
    """Keep BatchNorm's running statistics: each micro-batch must count once, in the second pass."""
    norms = [
        m
        for m in module.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    momenta = [norm.momentum for norm in norms]
    counts = [_copy(norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if norm.num_batches_tracked is not None and count is not None:
                norm.num_batches_tracked.copy_(count)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
