"""Closed forms against the trace of the real step: peak within 5 %, traffic exactly."""

from __future__ import annotations

import pytest

from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.siglip import SigLIPConfig
from disco_ds.models import ModelConfig
from disco_ds.planner.comm import step_traffic
from disco_ds.planner.memory import step_memory
from disco_ds.planner.plan import profile_of
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.run import counted_metrics

TOLERANCE = 0.05


def compare(request: PlanRequest) -> None:
    from disco_ds.planner.trace import trace

    traced = trace(request).step
    known = profile_of(request)
    memory = step_memory(request, known)
    difference = memory.peak / traced.peak.bytes - 1
    assert abs(difference) <= TOLERANCE, (request, difference, traced.peak, memory.phases)
    traffic = step_traffic(request, known)
    assert traffic == traced.traffic, (request, traffic, traced.traffic)
    assert counted_metrics(traffic) == traced.counted, request
    assert sum(traced.peak.parts.values()) == traced.peak.bytes


def request_of(
    model: str,
    strategy: str,
    precision: str,
    *,
    ranks: int = 8,
    local: int = 64,
    micro: int | None = None,
    checkpointing: bool = False,
    **changes: object,
) -> PlanRequest:
    return PlanRequest(
        ModelConfig(model, activation_checkpointing=checkpointing),
        global_batch_size=local * ranks,
        world_size=ranks,
        micro_batch_size=micro,
        precision=precision,  # type: ignore[arg-type]
        strategy=strategy,
        **changes,  # type: ignore[arg-type]
    )


SMALL = [
    request_of("disco-demo-vit", "single", "fp32", ranks=1, local=512),
    request_of("disco-demo-vit", "ddp", "bf16", local=512, micro=256),
    request_of("disco-demo-vit", "fsdp2", "bf16", local=512, micro=128, checkpointing=True),
    request_of("disco-demo-vit", "zero0", "bf16", local=512),
    request_of("disco-demo-vit", "zero1", "fp32", local=512, micro=256),
    request_of("disco-demo-rn", "zero2", "fp16", ranks=64, local=512),
    request_of("disco-demo-vit", "zero3", "bf16", local=512, micro=256),
    request_of("ViT-B-32", "zero2", "bf16", ranks=64, local=256, checkpointing=True),
]


@pytest.mark.parametrize("request_", SMALL, ids=lambda r: f"{r.model.name}-{r.strategy}")
def test_closed_forms_equal_the_trace(request_: PlanRequest) -> None:
    compare(request_)


LOSSES = [
    DiscoConfig(wire_dtype="bf16", tile_size=256),
    DiscoConfig(gather="ring"),
    DiscoConfig(gradient_reduction="reduce_scatter", wire_dtype="bf16"),
    DiscoConfig(gradient_reduction="all_reduce"),
    SigLIPConfig(),
    SigLIPConfig(gather="ring", wire_dtype="fp16"),
    FastCLIPConfig(),
    FastCLIPConfig(version="v0", gather="ring"),
    FastCLIPConfig(version="v2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.name}-{loss.gather}")
def test_every_way_of_a_loss(loss: object) -> None:
    """A large batch in small micro-batches, so that the loss has a say in the peak."""
    compare(
        request_of(
            "disco-demo-vit", "ddp", "fp32", local=2048, micro=64, loss=loss, num_samples=9999
        )
    )


def test_a_trace_leaves_no_group_and_no_patch_behind() -> None:
    import torch
    import torch.distributed as dist

    before = (torch.nn.Module._apply, dist.Reducer, torch.nn.functional.layer_norm)
    compare(request_of("disco-demo-vit", "ddp", "fp32", ranks=2, local=64))
    assert not dist.is_initialized()
    assert (torch.nn.Module._apply, dist.Reducer, torch.nn.functional.layer_norm) == before


def test_offload_is_left_to_the_closed_forms() -> None:
    from disco_ds.planner.trace import trace

    with pytest.raises(ValueError, match="host memory"):
        trace(request_of("disco-demo-vit", "zero2_offload", "bf16"))


MODELS = ("ViT-B-32", "ViT-B-16", "ViT-L-14", "RN50", "ViT-B-16-SigLIP")
GRID = [
    request_of(model, strategy, precision, ranks=ranks, local=256, micro=micro, checkpointing=on)
    for number, (model, strategy) in enumerate(
        (model, strategy)
        for model in MODELS
        for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    )
    for precision in ("fp32", "bf16", "fp16")
    for ranks, micro, on in (((8, None, False), (64, 64, True), (1024, 128, False))[number % 3],)
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:activation checkpointing has no effect")
@pytest.mark.parametrize(
    "request_", GRID, ids=lambda r: f"{r.model.name}-{r.strategy}-{r.precision}-{r.world_size}"
)
def test_grid(request_: PlanRequest) -> None:
    compare(request_)
