"""Closed forms against the trace of the real step: peak within 5 %, traffic exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import covering_rows

from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.siglip import SigLIPConfig
from disco_ds.models import ModelConfig
from disco_ds.optim import OptimConfig, OptimizerName
from disco_ds.planner.comm import hook_traffic, step_traffic
from disco_ds.planner.memory import step_memory
from disco_ds.planner.plan import profile_of
from disco_ds.planner.request import LossConfig, PlanRequest
from disco_ds.planner.run import counted_metrics
from disco_ds.strategies.config import EngineConfig

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
    assert counted_metrics(hook_traffic(request, known)) == traced.counted, request
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
    # So few pairs that what is gathered and reduced makes the peak.
    request_of("disco-demo-vit", "fsdp2", "bf16", local=8),
]


def test_a_trace_leaves_everything_as_it_was() -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle

    from disco_ds.losses.softmax import SoftmaxPairs
    from disco_ds.planner.trace import trace

    owners = (AllGatherCoalescedHandle, torch.nn.Module, SoftmaxPairs)
    before = [dict(vars(owner)) for owner in owners]
    trace(request_of("disco-demo-vit", "zero2", "fp16"))
    assert [dict(vars(owner)) for owner in owners] == before
    assert "is_fp16_supported" not in vars(get_accelerator())


@pytest.mark.parametrize("request_", SMALL, ids=lambda r: f"{r.model.name}-{r.strategy}")
def test_closed_forms_equal_the_trace(request_: PlanRequest) -> None:
    compare(request_)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("fsdp2", "sgdm"),
        *(
            pytest.param(strategy, optimizer, marks=pytest.mark.slow)
            for strategy in ("ddp", "fsdp2", "zero0", "zero2", "zero3")
            for optimizer in ("lamb", "lion", "sgdm")
            if (strategy, optimizer)
            not in (("fsdp2", "sgdm"), ("zero2", "lamb"), ("zero3", "lamb"))
        ),
    ],
)
def test_optimizers_need_what_the_trace_says(strategy: str, optimizer: OptimizerName) -> None:
    """So few pairs that the optimizer makes the peak."""
    request_ = request_of("disco-demo-rn", strategy, "fp32", local=2)
    compare(replace(request_, optim=OptimConfig(name=optimizer)))


# Settings of ZeRO-3 for which its rules matter in a model of two million parameters.
TIGHT = {
    "stage": 3,
    "stage3_param_persistence_threshold": 1000,
    "stage3_prefetch_bucket_size": 100_000,
}
RULES: list[tuple[int | None, bool, dict[str, int]]] = [
    (None, True, {"stage3_max_reuse_distance": 200_000}),
    (None, False, {"stage3_max_live_parameters": 300_000}),
    (32, True, {"stage3_max_live_parameters": 200_000, "stage3_max_reuse_distance": 400_000}),
    (12, False, {"stage3_max_live_parameters": 1000}),
    (32, False, {"stage3_prefetch_bucket_size": 0}),
]


@pytest.mark.parametrize(
    ("micro", "checkpointing", "rules"),
    [RULES[0], *(pytest.param(*rules, marks=pytest.mark.slow) for rules in RULES[1:])],
)
def test_zero3_fetches_by_its_rules(
    micro: int | None, checkpointing: bool, rules: dict[str, int]
) -> None:
    request = request_of(
        *("disco-demo-vit", "zero3", "bf16"),
        ranks=2,
        local=60,
        micro=micro,
        checkpointing=checkpointing,
        ds_config={"zero_optimization": TIGHT | rules},
    )
    compare(request)
    loose = request.with_(ds_config={"zero_optimization": TIGHT})
    known = profile_of(request)
    assert step_traffic(request, known) != step_traffic(loose, known)  # they do matter


@pytest.mark.slow
def test_reuse_distance_has_no_say_with_micro_batches() -> None:
    """The first pass uses each parameter once: all are given up, and that decision stays."""
    near, far = (
        request_of(
            *("disco-demo-vit", "zero3", "bf16"),
            ranks=2,
            local=60,
            micro=12,
            ds_config={"zero_optimization": TIGHT | rules},
        )
        for rules in ({"stage3_max_reuse_distance": 1000}, {})
    )
    compare(near)
    compare(far)
    known = profile_of(near)
    assert step_traffic(near, known) == step_traffic(far, known)


@pytest.mark.slow
@pytest.mark.parametrize("local", [8, 256])
@pytest.mark.parametrize("micros", [1, 2, 4])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_fsdp2_options(local: int, micros: int, every: bool, reshard: bool) -> None:
    engine = EngineConfig(reduce_every_micro_batch=every, reshard_after_forward=reshard)
    compare(
        request_of(
            "disco-demo-vit", "fsdp2", "bf16", local=local, micro=local // micros, engine=engine
        )
    )


@pytest.mark.parametrize(
    ("strategy", "micro"),
    [
        ("ddp", 32),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("fsdp2", 22), ("zero2", 64), ("zero3", 64), ("zero3", 32))
        ),
    ],
)
def test_statistics_of_synchronised_batch_norm(strategy: str, micro: int) -> None:
    model = ModelConfig("disco-demo-rn", batch_norm="synced")
    plain = request_of("disco-demo-rn", strategy, "bf16", local=64, micro=micro)
    compare(plain.with_(model=model))


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


@pytest.mark.parametrize(
    "loss",
    [
        DiscoConfig(),
        *(
            pytest.param(loss, marks=pytest.mark.slow)
            for loss in (*LOSSES, FastCLIPConfig(version="v2", mode="fastclip_compat"))
        ),
    ],
    ids=lambda loss: f"{loss.name}-{loss.gather}",
)
def test_repeated_blocks_show_what_all_blocks_show(
    loss: LossConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace works on one block per kind; here it works on all of them as well."""
    from disco_ds.losses import disco
    from disco_ds.planner import fake
    from disco_ds.planner.trace import trace

    local = 64
    # Room for the tiles of some blocks, not of all.
    monkeypatch.setattr(disco, "KEPT_TILES_BYTES", 3 * 4 * local * local)
    request = request_of(
        "disco-demo-vit", "ddp", "fp32", ranks=6, local=local, micro=32, loss=loss, num_samples=999
    )
    short = trace(request).step
    monkeypatch.setattr(fake, "repeating", tuple)
    assert trace(request).step == short


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
GRID = covering_rows(
    [
        MODELS,
        ("ddp", "zero1", "zero2", "zero3", "fsdp2"),
        ("fp32", "bf16", "fp16"),
        (8, 64, 1024),
        (1, 2, 3, 4),
        (False, True),
    ],
    strength=2,
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:activation checkpointing has no effect")
@pytest.mark.parametrize("row", GRID, ids=lambda row: "-".join(map(str, row)))
def test_grid(row: tuple[str, str, str, int, int, bool]) -> None:
    """Every pair of settings of the whole product of 1800, in 26 rows."""
    model, strategy, precision, ranks, micros, checkpointing = row
    micro = None if micros == 1 else -(-256 // micros)
    compare(
        request_of(
            *(model, strategy, precision),
            ranks=ranks,
            local=256,
            micro=micro,
            checkpointing=checkpointing,
        )
    )
