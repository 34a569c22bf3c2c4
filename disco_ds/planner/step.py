"""One training step of a rank, watched by a meter: on fake tensors for a trace, or on real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disco_ds.comm_hooks import CountingHook
from disco_ds.distributed import World, mean_over_ranks_
from disco_ds.grad_cache import Pairs, contrastive_backward
from disco_ds.losses.base import ContrastiveLoss
from disco_ds.models import Encoders, Temperature, TemperatureConfig, initial_logit_bias
from disco_ds.optim import build_temperature_optimizer
from disco_ds.planner.engines import make_strategy
from disco_ds.planner.fake import fake_deepspeed
from disco_ds.planner.meter import HOST, MemoryMeter, Peak, Traffic
from disco_ds.planner.request import PlanRequest
from disco_ds.preemption import Requests
from disco_ds.strategies.base import Strategy

PHASES = ("encode", "loss", "backward", "step")


@dataclass(frozen=True)
class Measured:
    """One optimizer step of a rank, after others: all lasting state exists by then."""

    peak: Peak
    """Highest sum of live tensor bytes, and its parts."""
    phases: dict[str, Peak]
    """The same within each of :data:`PHASES`."""
    at_rest: dict[str, int]
    """Live bytes between steps, by part."""
    traffic: list[Traffic]
    """Nothing on a single rank, whose engine may call collectives all the same."""
    counted: dict[str, float]
    """What :class:`CountingHook` counted in this step (nothing on a single rank)."""


def blank_inputs(pairs: int, image_size: tuple[int, int], context: int) -> tuple[Tensor, Tensor]:
    """Images and tokens of a batch that mean nothing."""
    return torch.zeros(pairs, 3, *image_size), torch.zeros(pairs, context, dtype=torch.long)


class MeteredStep:
    """One rank's parts of a run, and its step, watched by a meter."""

    def __init__(
        self,
        request: PlanRequest,
        world: World,
        encoders: Encoders,
        shape: tuple[tuple[int, int], int],
        meter: MemoryMeter,
        stack: ExitStack,
        *,
        is_fake: bool,
    ) -> None:
        self.request, self.world, self.meter = request, world, meter
        meter.mark(encoders.parameters(), "parameters")
        meter.mark(encoders.buffers(), "parameters")
        for parameter in encoders.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self.strategy = make_strategy(request, world)
        if request.stage is not None and is_fake:
            from disco_ds.strategies.zero import import_deepspeed

            import_deepspeed(world)
            stack.enter_context(fake_deepspeed())
        with meter.phase("setup", "engine buffers"):
            self.strategy.setup(encoders, request.optim)
        stack.callback(self.strategy.close)
        self.loss = self._make_loss()
        self.counter = CountingHook()
        self.strategy.attach_hook(self.counter, self.loss)
        bias = initial_logit_bias(request.loss.name, request.global_batch_size)
        self.temperature = Temperature(TemperatureConfig(), bias=bias)
        self.temperature_optimizer = build_temperature_optimizer(
            request.optim, self.temperature.parameters()
        )
        self.pairs = self._pairs(*shape)
        meter.mark((self.pairs.image, self.pairs.text, self.pairs.index), "inputs")

    def _on_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.meter.mark([parameter.grad], "gradients")

    def _make_loss(self) -> ContrastiveLoss:
        request = self.request
        loss = request.loss.build(
            self.strategy.process_group, normalize=True, num_samples=request.num_samples or None
        )
        if getattr(request.loss, "tables", None) == "cpu":
            self.meter.mark(loss.rank_state().values(), HOST)
        loss.register_forward_pre_hook(lambda *_: self._begin("loss", "loss"))
        loss.register_forward_hook(lambda *_: self._end())
        return loss

    def _begin(self, phase: str, category: str) -> None:
        self._open = self.meter.phase(phase, category)
        self._open.__enter__()

    def _end(self) -> None:
        self._open.__exit__(None, None, None)

    def _pairs(self, image_size: tuple[int, int], context: int) -> Pairs:
        count = self.request.local_batch_size
        image, text = blank_inputs(count, image_size, context)
        return Pairs(image, text, torch.zeros(count, dtype=torch.long))

    def measure(self, *, warm_up: int, counted: int = 1) -> Measured:
        """Take steps until all lasting state exists, then ``counted`` more; the lowest peak counts.

        On real ranks a communication thread may let go of a step's tensors only in the next one.
        """
        self.take()
        self.sort_lasting_state()
        for _ in range(warm_up - 1):
            self.take()
        return min((self._measured() for _ in range(counted)), key=lambda found: found.peak.bytes)

    def _measured(self) -> Measured:
        self.meter.restart()
        self.counter.metrics()
        self.take()
        meter, travels = self.meter, self.world.world_size > 1
        return Measured(
            peak=meter.peak(),
            phases={name: meter.peaks[name] for name in PHASES if name in meter.peaks},
            at_rest={key: value for key, value in meter.live.items() if value and key != HOST},
            traffic=meter.traffic() if travels else [],
            counted=self.counter.metrics() if travels else {},
        )

    def take(self) -> None:
        """One optimizer step, as the trainer takes it."""
        self.temperature_optimizer.zero_grad(set_to_none=True)
        watched = WatchedEngine(self.strategy, self.meter)
        with self.meter.phase("encode", "activations"):
            contrastive_backward(
                watched,
                self.loss,
                self.temperature,
                self.pairs,
                micro_batch_size=self.request.micro_batch,
                equal_ranks=True,
            )
        with self.meter.phase("step", "optimizer temporaries"):
            result = self.strategy.step(self.request.optim.lr)
            self.loss.after_step(result.skipped)
            own = [p.grad for p in self.temperature.parameters() if p.grad is not None]
            requests = torch.zeros(len(Requests._fields), device=self.world.device)
            mean_over_ranks_([*own, requests], self.world)
            self.temperature_optimizer.step()
            self.temperature.clamp_()

    def sort_lasting_state(self) -> None:
        """Give names to what lives on between steps."""
        inner: Any = getattr(self.strategy, "optimizer", None)
        if inner is None:
            inner = self.strategy._torch_optimizer  # type: ignore[attr-defined]
        own = {id(parameter) for parameter in self.strategy.module.parameters()}
        masters = [
            p for group in _all_groups(inner, self.strategy) for p in group if id(p) not in own
        ]
        self.meter.mark(masters, "master weights")
        states = [v for state in inner.state.values() for v in state.values()]
        self.meter.mark([v for v in states if isinstance(v, Tensor)], "optimizer")


def _all_groups(optimizer: Any, strategy: Any) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
    engine = getattr(strategy, "engine", None)
    flat = getattr(getattr(engine, "optimizer", None), "fp32_partitioned_groups_flat", None)
    if flat is not None:
        groups.append(list(flat))
    return groups


class WatchedEngine:
    """A strategy whose calls tell the meter where the step is."""

    def __init__(self, strategy: Strategy, meter: MemoryMeter) -> None:
        self._strategy, self._meter = strategy, meter
        self.world, self.module = strategy.world, strategy.module

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The strategy's; what comes out counts as features."""
        features = self._strategy.encode(image, text)
        self._meter.mark([part for part in features if part is not None], "features")
        return features

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """The strategy's; from here on it is the backward phase."""
        with self._meter.phase("backward", "activations"), self._strategy.accumulate():
            yield

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The strategy's."""
        return self._strategy.micro_batch(is_last=is_last)

    def backward(self, surrogate: Tensor) -> None:
        """The strategy's."""
        self._strategy.backward(surrogate)
