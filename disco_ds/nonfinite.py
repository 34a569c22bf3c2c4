"""Which gradients of a refused step are not finite on this rank, found by taking the step again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from disco_ds.grad_cache import (
    NonFiniteLoss,
    Pairs,
    RandomState,
    contrastive_backward,
    frozen_running_statistics,
)
from disco_ds.losses.base import ContrastiveLoss
from disco_ds.models import Temperature
from disco_ds.strategies.base import Strategy


def broken_gradients(
    strategy: Strategy,
    loss: ContrastiveLoss,
    temperature: Temperature,
    pairs: Pairs,
    random: RandomState,
    *,
    micro_batch_size: int,
    equal_ranks: bool = False,
) -> list[str]:
    """Names of this rank's gradients that are not finite before any reduction.

    In the order in which the backward pass meets them, so that the first one is where it began:
    "image features", "text features", parameters. The step is taken again from the random state
    that it had; the engine, its gradients and the random state are left as they are, the loss
    remembers its last call.

    Collective: forward, loss and backward of a step, without the reduction of gradients. Gathered
    parameters are held one unit at a time, as in a step, and of the gradients one at a time.
    """
    broken: dict[str, None] = {}

    def look(name: str, gradient: Tensor) -> None:
        if not gradient.isfinite().all():
            broken[name] = None

    loss.after_step(skipped=True)  # the step is not taken as it was
    now = RandomState.capture(pairs.image.device)
    random.restore()
    try:
        with strategy.leaves() as leaves, frozen_running_statistics(strategy.module):
            probe = _Probe(strategy, leaves, look)
            try:
                contrastive_backward(
                    probe,
                    loss,
                    temperature,
                    pairs,
                    micro_batch_size=micro_batch_size,
                    equal_ranks=equal_ranks,
                )
            finally:
                probe.close()
    except NonFiniteLoss as error:  # device arithmetic that does not repeat to the last bit
        return error.tensors
    finally:
        now.restore()
    return list(broken)


class _Probe:
    """The engine of a step whose gradients are looked at and thrown away."""

    def __init__(
        self, strategy: Strategy, leaves: Mapping[str, Tensor], look: Callable[[str, Tensor], None]
    ) -> None:
        self.world, self.module = strategy.world, strategy.module
        self._computing, self._look = strategy.computing, look
        self._leaves = list(leaves.values())
        self._hooks = [leaf.register_hook(self._consume(name)) for name, leaf in leaves.items()]

    def close(self) -> None:
        """Forget the leaves."""
        for hook in self._hooks:
            hook.remove()

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        with self._computing():
            features: tuple[Tensor | None, Tensor | None] = self.module(image, text)
        for name, part in zip(("image features", "text features"), features, strict=True):
            if part is not None and part.requires_grad:
                part.register_hook(lambda gradient, name=name: self._look(name, gradient))
        return features

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, surrogate: Tensor) -> None:
        # Asked for by name, gradients do not reach the hooks with which engines reduce them.
        torch.autograd.grad(surrogate, self._leaves, allow_unused=True)

    def _consume(self, name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            self._look(name, gradient)
            # autograd keeps what it is given back until the end: a zero of this shape has 4 bytes.
            return gradient.new_zeros(()).expand_as(gradient)

        return hook
