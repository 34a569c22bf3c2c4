"""Floors of a step's time: what compute and links cannot go below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.planner.meter import Traffic
from disco_ds.planner.profile import Profile
from disco_ds.planner.request import PlanRequest

# Times the bytes of whole results travel through a rank's link, in units of (W - 1) / W.
ON_THE_WIRE = {"all_reduce": 2.0}


@dataclass(frozen=True)
class Hardware:
    """The card and its links; bytes and operations per second."""

    memory: float
    """Bytes of one card."""
    link: float = 25e9
    """Between nodes, per GPU."""
    intra: float = 300e9
    """Inside a node, per GPU."""
    gpus_per_node: int = 8
    flops: float = 312e12
    mfu: float = 0.4
    """Share of ``flops`` that is reached."""
    slack: float = 0.05
    """Allocator slack, as a share of the peak of live tensors."""
    reserved: float = 0.75 * 2**30
    """CUDA context and NCCL buffers."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step if nothing else cost anything."""

    compute: float
    link: float
    by_phase: dict[str, float]
    """Seconds on the link, by phase."""

    @property
    def overlapped(self) -> float:
        """With perfect overlap."""
        return max(self.compute, self.link)

    @property
    def serial(self) -> float:
        """With none."""
        return self.compute + self.link


def step_time(
    request: PlanRequest, profile: Profile, traffic: Iterable[Traffic], hardware: Hardware
) -> StepTime:
    """Floors for a step."""
    total = step_flops(request, profile)
    by_phase = link_seconds(traffic, request.world_size, hardware)
    return StepTime(
        compute=total / (hardware.flops * hardware.mfu),
        link=sum(by_phase.values()),
        by_phase=by_phase,
    )


def step_flops(request: PlanRequest, profile: Profile) -> float:
    """Products of a step on one rank: encoders, recomputation, loss."""
    forwards = 1.0  # of the backward phase
    forwards += 2.0  # the backward itself
    forwards += request.micro_batches > 1  # the pass without graph
    if request.model.activation_checkpointing:
        forwards += 1 / request.model.checkpoint_every
    encoders = forwards * profile.flops * request.local_batch_size
    product = 2.0 * request.local_batch_size * request.global_batch_size * profile.dim
    return encoders + loss_products(request) * product


def loss_products(request: PlanRequest) -> float:
    """Products of size ``b x B x d`` in a call of the loss, forward and backward."""
    again = 1 / request.world_size
    if isinstance(request.loss, DiscoConfig):
        return 5 - again if request.loss.gradient_reduction == "scalar_gather" else 4
    if isinstance(request.loss, FastCLIPConfig):
        return 10 if request.loss.version == "v2" else 5 - again
    return 4 - again


def link_seconds(
    traffic: Iterable[Traffic], world_size: int, hardware: Hardware
) -> dict[str, float]:
    """Seconds on the slowest link, by phase; a ring of collectives, latency left out."""
    rate = hardware.intra if world_size <= hardware.gpus_per_node else hardware.link
    seconds: Counter[str] = Counter()
    for entry in traffic:
        seconds[entry.phase] += wire_bytes(entry, world_size) / rate  # type: ignore[assignment]
    return {phase: float(value) for phase, value in seconds.items()}


def wire_bytes(entry: Traffic, world_size: int) -> float:
    """Bytes that a rank receives for a collective, by a ring."""
    if entry.collective == "send_recv":
        return float(entry.bytes)
    return entry.bytes * ON_THE_WIRE.get(entry.collective, 1.0) * (world_size - 1) / world_size
