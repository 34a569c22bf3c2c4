"""What the training step asks of an engine, and nothing more.

A strategy owns the wrapped encoders and their optimizer. The encoders are touched only through
``forward()`` and gradients come back as one scalar, so every engine sees an ordinary backward.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disco_ds.comm_hooks import CommHook, HookHandle, register_comm_hook
from disco_ds.distributed import World, mean_over_ranks_
from disco_ds.models import Encoders
from disco_ds.optim import OptimConfig
from disco_ds.strategies.config import EngineConfig


@dataclass(frozen=True)
class StepResult:
    """What became of one optimizer step."""

    grad_norm: float
    """Global gradient norm of the encoders before clipping; infinite or NaN when skipped."""

    skipped: bool
    """True when the gradients were not finite; nothing was changed then."""


@dataclass(frozen=True)
class EngineState:
    """Encoder state in fp32 under plain names, complete on the main rank, empty on the others.

    The form is the same for every strategy, ZeRO stage and number of ranks.
    """

    parameters: dict[str, Tensor]
    """Parameters and persistent buffers by name."""

    moments: dict[str, Tensor]
    """``"KEY/NAME"``: optimizer state of the trainable parameter NAME, such as exp_avg."""

    optimizer_steps: int
    """Steps the optimizer has taken (Adam's bias correction)."""

    loss_scale: dict[str, float] | None = None
    """fp16's dynamic scale: ``value`` and ``good_steps`` since its last change."""


@contextmanager
def local_rank_of_device(world: World) -> Iterator[None]:
    """LOCAL_RANK as the number of this rank's GPU, which is what engines take it for.

    They differ where a launcher shows every rank its own GPU, as number 0.
    """
    if world.device.type != "cuda":
        yield
        return
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(world.device.index)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


class Strategy(ABC):
    """One way of spreading model and optimizer over ranks. Gradients are averaged over ranks."""

    name: ClassVar[str]
    world: World
    module: Encoders
    """The encoders as built; call :meth:`encode` instead of this."""

    def __init__(self, world: World, engine: EngineConfig | None = None) -> None:
        self.world = world
        self.config = engine or EngineConfig()
        self._hook: CommHook | None = None
        self._handle: HookHandle | None = None
        self._statistics_names: list[str] | None = None

    def check_optimizer(self, optim: OptimConfig) -> None:
        """Refuse an optimizer that this strategy cannot run exactly.

        Raises:
            ValueError: naming the alternatives.
        """
        return

    def check_device(self) -> None:
        """Refuse what this device cannot compute.

        Raises:
            ValueError: naming the setting and the alternative.
        """
        return

    @abstractmethod
    def setup(self, encoders: Encoders, optim: OptimConfig) -> None:
        """Wrap the encoders and make their optimizer. Collective."""

    @property
    @abstractmethod
    def hookable(self) -> Any:
        """What :func:`register_comm_hook` takes; None where no gradients travel."""

    def rehearse(self, image: Tensor, text: Tensor) -> None:
        """Reach the layout of communication that later steps have, before a state is loaded.

        With it, a resumed run adds in the same order as the uninterrupted one. Nothing to do for
        most engines. Collective.
        """
        return

    def attach_hook(self, hook: CommHook, loss: nn.Module) -> None:
        """Let a communication hook decide how gradients travel, from now on.

        Raises:
            ValueError: the hook does not work with this strategy or loss.
        """
        self._hook = hook
        if self.hookable is None:
            hook.bind(loss, self.process_group)
        else:
            self._handle = register_comm_hook(self.hookable, hook, loss=loss)

    def hook_state(self) -> dict[str, Tensor]:
        """What the hook carries from step to step on this rank."""
        return {} if self._hook is None else self._hook.state()

    def load_hook_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over the :meth:`hook_state` of the same rank of as many ranks."""
        if self._hook is not None:
            self._hook.load_state(state)

    def hook_metrics(self) -> dict[str, float]:
        """What the hook has to log; nothing without one."""
        return {} if self._hook is None else self._hook.metrics()

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks over which gradients are averaged; None on a single process."""
        return dist.group.WORLD if self.world.world_size > 1 else None

    @abstractmethod
    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Features ``[b, d]`` of images and texts, not normalised, through the wrapped forward.

        Collective: all ranks call it equally often, with any batch sizes.
        """

    def computing(self) -> AbstractContextManager[object]:
        """Surround a direct call of :attr:`module` to compute in the strategy's precision."""
        return nullcontext()

    @contextmanager
    def leaves(self) -> Iterator[dict[str, Tensor]]:
        """The trainable tensors that autograd meets in :attr:`module`, by parameter name.

        Inside, the module may be called directly and ``torch.autograd.grad`` asked for gradients
        of leaves: they are this rank's own, whole, and the engine does not learn of them.
        Collective, and so are calls and backward passes of the module inside.
        """
        yield {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def accumulate(self) -> AbstractContextManager[None]:
        """Surround the backward calls of one step; gradients are reduced once."""
        return nullcontext()

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Surround encoding and backward of one micro-batch, inside :meth:`accumulate`.

        Features encoded outside belong to a step of one micro-batch, the last.
        """
        return nullcontext()

    @abstractmethod
    def backward(self, surrogate: Tensor) -> None:
        """Add the gradient of a 0-D surrogate. Collective in the last micro-batch."""

    @abstractmethod
    def step(self, lr: float) -> StepResult:
        """Clip, update with this learning rate, clear the gradients. Collective.

        Raises:
            LossScaleSpent: on all ranks.
        """

    @abstractmethod
    def state(self) -> EngineState:
        """Everything a resumed run needs of the encoders. Collective."""

    @abstractmethod
    def load_state(self, state: EngineState) -> None:
        """Take over a state; every rank passes the whole state. Collective."""

    def close(self) -> None:
        """Release the engine and its hook."""
        if self._handle is not None:
            self._handle.remove()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Encode without gradients and without dropout; training is left as it was."""
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(training)

    def average_buffers(self) -> None:
        """Average floating-point buffers (BatchNorm's running statistics) over ranks.

        Each rank normalises with its own batch; what is evaluated and saved is the mean.
        One all-reduce of all buffers together; none for models without such buffers.
        """
        mean_over_ranks_(list(self._statistics().values()), self.world)

    @contextmanager
    def keeping_statistics(self) -> Iterator[dict[str, Tensor]]:
        """Give every rank its own running statistics back afterwards; yields copies of them.

        So that training does not depend, in the last bits, on when it was evaluated and saved.
        """
        own = self.own_statistics()
        try:
            yield own
        finally:
            self.load_own_statistics(own)

    def own_statistics(self) -> dict[str, Tensor]:
        """Copies of this rank's running statistics; nothing without BatchNorm."""
        return {name: buffer.clone() for name, buffer in self._statistics().items()}

    def load_own_statistics(self, values: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`own_statistics` returns."""
        buffers = self._statistics()
        for name, value in values.items():
            buffers[name].copy_(value)

    def _statistics(self) -> dict[str, Tensor]:
        if self._statistics_names is None:
            buffers = persistent_buffers(self.module).items()
            self._statistics_names = [name for name, b in buffers if b.is_floating_point()]
        return {name: self.module.get_buffer(name) for name in self._statistics_names}


def ensure_process_group(world: World) -> None:
    """A group for engines that need one even for a single process; others exist already."""
    if not dist.is_initialized():
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the weights, by name."""
    names = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in names}


def copy_into(
    targets: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Copy tensors by name, in place; ``copy(target, value)`` does it for one.

    Raises:
        ValueError: a name is missing, or a shape differs.
    """
    for name, target in targets.items():
        if name not in values or values[name].shape != target.shape:
            found = "missing" if name not in values else f"of shape {tuple(values[name].shape)}"
            raise ValueError(
                f"the checkpoint does not fit the model: {name} is {found}, "
                f"needed {tuple(target.shape)}"
            )
        with torch.no_grad():
            copy(target, values[name])
