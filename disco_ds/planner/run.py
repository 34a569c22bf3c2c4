"""A real run beside its plan: what was predicted at the start, what was measured by the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from disco_ds.comm_hooks import CommHookConfig
from disco_ds.distributed import World
from disco_ds.losses.disco import DiscoConfig, GradientReduction
from disco_ds.models import ModelConfig
from disco_ds.optim import OptimConfig
from disco_ds.planner.comm import gradient_bytes, hook_traffic
from disco_ds.planner.memory import Memory, step_memory
from disco_ds.planner.meter import MemoryMeter, Traffic
from disco_ds.planner.plan import profile_of
from disco_ds.planner.request import LossConfig, PlanRequest
from disco_ds.planner.units import gib, short_bytes
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.config import EngineConfig, Precision
from disco_ds.strategies.ddp import DDPStrategy
from disco_ds.strategies.fsdp2 import FSDP2Strategy
from disco_ds.strategies.zero import ZeroStrategy


class RunConfig(Protocol):
    """The part of a run's configuration that a plan depends on."""

    @property
    def model(self) -> ModelConfig: ...  # noqa: D102
    @property
    def global_batch_size(self) -> int: ...  # noqa: D102
    @property
    def micro_batch_size(self) -> int | None: ...  # noqa: D102
    @property
    def precision(self) -> Precision: ...  # noqa: D102
    @property
    def loss(self) -> LossConfig: ...  # noqa: D102
    @property
    def optim(self) -> OptimConfig: ...  # noqa: D102
    @property
    def engine(self) -> EngineConfig: ...  # noqa: D102
    @property
    def comm_hook(self) -> CommHookConfig: ...  # noqa: D102


@dataclass(frozen=True)
class Prediction:
    """What a step of this run should need."""

    request: PlanRequest
    memory: Memory
    traffic: list[Traffic]
    """What a communication hook sees of it."""

    @property
    def peak(self) -> float:
        """Bytes of live tensors on a rank at the peak."""
        return self.memory.peak

    @property
    def counted(self) -> dict[str, float]:
        """What :class:`~disco_ds.comm_hooks.CountingHook` will log per step."""
        return counted_metrics(self.traffic)

    @property
    def counted_bytes(self) -> float:
        """Their bytes together."""
        return sum(value for name, value in self.counted.items() if name.endswith("_bytes"))

    def line(self) -> str:
        """For the start of a run."""
        return (
            f"planned: peak {gib(self.peak)} GiB of tensors per rank (in {self.memory.peak_phase}),"
            f" {short_bytes(self.counted_bytes)} of features and gradients per step"
        )


def predict_run(
    config: RunConfig, strategy: Strategy, world: World, *, num_samples: int = 0
) -> Prediction:
    """Plan the step of a run that is about to start; a few seconds, no communication.

    Args:
        config: a run's configuration.
        strategy: its engine, set up or not.
        world: this process.
        num_samples: size of the data set.
    """
    like_cuda = world.device.type == "cuda"
    request = PlanRequest(
        model=replace(config.model, init=None),
        global_batch_size=config.global_batch_size,
        world_size=world.world_size,
        micro_batch_size=config.micro_batch_size,
        precision=config.precision,
        strategy=_name_of(strategy),
        loss=_as_hooked(config.loss, config.comm_hook),
        optim=config.optim,
        engine=config.engine,
        ds_config=strategy.ds_config if isinstance(strategy, ZeroStrategy) else None,
        num_samples=num_samples,
    )
    known = profile_of(request, like_cuda=like_cuda)
    memory = step_memory(request, known, like_cuda=like_cuda)
    traffic = hook_traffic(request, known)
    if config.comm_hook.compress is not None:
        traffic = [_compressed(entry, request) for entry in traffic]
    return Prediction(request, memory, traffic)


def _as_hooked(loss: LossConfig, hook: CommHookConfig) -> LossConfig:
    """The loss as a communication hook sets it."""
    if hook.name is None:
        return loss
    if hook.wire_dtype is not None:
        loss = replace(loss, wire_dtype=hook.wire_dtype)
    if isinstance(loss, DiscoConfig):
        loss = replace(loss, gradient_reduction=HOOKED_REDUCTIONS[hook.name])
    return loss


def _compressed(entry: Traffic, request: PlanRequest) -> Traffic:
    """Gradients on the wire in 16 bits."""
    if entry.phase != "backward" or entry.collective not in REDUCTIONS:
        return entry
    return replace(entry, bytes=entry.bytes * 2 // gradient_bytes(request))


def _name_of(strategy: Strategy) -> str:
    if isinstance(strategy, ZeroStrategy):
        return f"zero{strategy.stage}"
    if isinstance(strategy, FSDP2Strategy):
        return "fsdp2"
    return "ddp" if isinstance(strategy, DDPStrategy) else "single"


HOOKED_REDUCTIONS: dict[str, GradientReduction] = {
    "fastclip": "scalar_gather",
    "openclip": "reduce_scatter",
    "disco": "all_reduce",
}
PLANES = {"loss": "features", "backward": "parameters"}
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def counted_metrics(traffic: list[Traffic]) -> dict[str, float]:
    """The share of a step's traffic that ``CountingHook`` sees, under its names."""
    found: dict[str, float] = {}
    for entry in traffic:
        plane = PLANES.get(entry.phase)
        if plane is None or (plane == "parameters" and entry.collective not in REDUCTIONS):
            continue
        found[f"comm/{plane}/{entry.collective}_bytes"] = float(entry.bytes)
        found[f"comm/{plane}/{entry.collective}_calls"] = float(entry.calls)
    return found


def measured_line(
    prediction: Prediction, measured_peak: float, counted: Mapping[str, float] | None = None
) -> str:
    """For the end of a run: measured numbers beside the predicted ones.

    Args:
        prediction: that of the start.
        measured_peak: bytes, see :func:`start_measuring`.
        counted: the last ``comm/...`` metrics of a ``CountingHook``, if one counted.
    """
    text = (
        f"measured: peak {gib(measured_peak)} GiB, planned {gib(prediction.peak)} GiB "
        f"({measured_peak / prediction.peak - 1:+.1%})"
    )
    if not counted:
        return text
    own = sum(value for name, value in counted.items() if name.endswith("_bytes"))
    same = "as planned" if own == prediction.counted_bytes else "planned "
    if own != prediction.counted_bytes:
        same += short_bytes(prediction.counted_bytes)
    return f"{text}; {short_bytes(own)} of features and gradients per step, {same}"


class PeakMeasure:
    """The peak of a run: CUDA's allocator, or counted tensor bytes of one step on a CPU.

    On a CPU every operator of the first :data:`COUNTED_STEP` steps is looked at, which slows them
    down; start before the engine is made, or its buffers are missed.
    """

    COUNTED_STEP = 3

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meter: MemoryMeter | None = None
        self._steps = 0
        self._peak = 0.0

    def start(self) -> PeakMeasure:
        """Begin to measure."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._meter = MemoryMeter()
            self._meter.__enter__()
        return self

    def step_begins(self) -> None:
        """Tell that a step begins: what lies between two of them (a save) is not counted."""
        if self._meter is not None and self._steps == self.COUNTED_STEP - 1:
            self._meter.restart()

    def step_taken(self) -> None:
        """Tell that an optimizer step was taken or skipped."""
        self._steps += 1
        if self._meter is not None and self._steps == self.COUNTED_STEP:
            self.stop()

    def stop(self) -> None:
        """End counting on a CPU; harmless otherwise."""
        if self._meter is not None:
            if self._steps >= self.COUNTED_STEP:
                self._peak = float(self._meter.peak().bytes)
            self._meter.__exit__(None, None, None)
            self._meter = None

    def peak(self) -> float:
        """Bytes at the peak; on a CPU 0 where no step was counted."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        self.stop()
        return self._peak
