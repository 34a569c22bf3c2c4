"""Pieces of the closed forms against arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_ds.models import ModelConfig
from disco_ds.planner.comm import ddp_buckets, fallback_buckets, ipg_buckets, step_traffic
from disco_ds.planner.cost import Hardware, step_flops, wire_bytes
from disco_ds.planner.memory import peer_loss_memory, step_memory
from disco_ds.planner.meter import MemoryMeter, Traffic
from disco_ds.planner.plan import make_plan, profile_of
from disco_ds.planner.profile import profile
from disco_ds.planner.request import STRATEGIES, PlanRequest, shipped_ds_config
from disco_ds.planner.solve import cheapest, largest_batch, remedy
from disco_ds.planner.units import parse_bytes, parse_flops, parse_rate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s.startswith("zero")])
def test_zero_strategies_are_the_shipped_files(strategy: str) -> None:
    shipped = json.loads((ROOT / "ds_configs" / f"{strategy}.json").read_text())
    assumed = shipped_ds_config(strategy)
    assert assumed["communication_data_type"] == shipped["communication_data_type"]
    for key, value in assumed["zero_optimization"].items():
        assert shipped["zero_optimization"][key] == value, key


def test_a_transformer_keeps_what_arithmetic_says() -> None:
    """fp32 ViT-B/32, per block and token: 16 widths, 2 numbers per LayerNorm, 1 per head."""
    tokens, width, heads, layers = 50, 768, 12, 12
    # ln_1, qkv, attention, its projection added, ln_2, hidden, gelu, and the new stream.
    block = tokens * width * 4 * (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1) + tokens * 4 * (4 + heads)
    known = profile(ModelConfig("ViT-B-32"), "fp32", autocast=False)
    slope = known.kept["image"].slope
    rest = slope - layers * block
    # Patches, class token, positions, ln_pre, pooling, projection: a few times the stream.
    assert 0 < rest < 8 * tokens * width * 4, rest / (tokens * width * 4)
    assert known.kept["image"].constant == 0


def test_flops_of_vit_b_32() -> None:
    known = profile(ModelConfig("ViT-B-32"), "fp32", autocast=False)
    assert known.flops == pytest.approx(43.4e9 / 3, rel=0.02)  # FlopCounterMode, forward + backward


def test_buckets() -> None:
    mib = 2**20
    assert ddp_buckets([mib, 20 * mib, 10 * mib, mib]) == [mib, 30 * mib, mib]
    assert ipg_buckets([6, 6, 3, 20], 10) == [6, 9, 20]
    assert fallback_buckets([6, 6, 3], 10) == [12, 3]


def test_wire_bytes_of_a_ring() -> None:
    assert wire_bytes(Traffic("loss", "all_gather", 1, 800), 8) == 700
    assert wire_bytes(Traffic("backward", "all_reduce", 1, 800), 8) == 1400
    assert wire_bytes(Traffic("loss", "send_recv", 7, 700), 8) == 700


def request_of(**changes: object) -> PlanRequest:
    base = PlanRequest(
        ModelConfig("disco-demo-vit"), global_batch_size=8192, world_size=8, strategy="zero2"
    )
    return base.with_(**changes)


def test_single_process_communicates_nothing() -> None:
    request = request_of(world_size=1, strategy="single")
    assert step_traffic(request, profile_of(request)) == []


def test_flops_grow_with_recomputation_and_a_second_pass() -> None:
    known = profile_of(request_of())
    plain = step_flops(request_of(), known)
    assert step_flops(request_of(micro_batch_size=256), known) > plain
    recomputing = ModelConfig("disco-demo-vit", activation_checkpointing=True)
    assert step_flops(request_of(model=recomputing), known) > plain


def test_offload_moves_state_to_the_host() -> None:
    plain = step_memory(request_of(), profile_of(request_of()))
    request = request_of(strategy="zero2_offload")
    moved = step_memory(request, profile_of(request))
    assert moved.host["optimizer"] == plain.at_rest["optimizer"]
    assert moved.peak < plain.peak


def test_fastclip_tables_are_in_the_host_unless_asked() -> None:
    from disco_ds.losses.fastclip import FastCLIPConfig

    on_host = request_of(loss=FastCLIPConfig(), num_samples=8_000_000)
    on_device = request_of(loss=FastCLIPConfig(tables="device"), num_samples=8_000_000)
    known = profile_of(on_host)
    assert step_memory(on_host, known).host["estimator tables"] == 4 * 3 * 1_000_000
    assert step_memory(on_device, known).at_rest["estimator tables"] == 4 * 3 * 1_000_000


def test_largest_batch_is_the_largest() -> None:
    hardware = Hardware(memory=8e9)
    best = largest_batch(request_of(), hardware)
    assert best is not None and best.fits
    size = best.request.global_batch_size
    assert not make_plan(request_of(global_batch_size=size + 8), hardware).fits
    assert largest_batch(request_of(), Hardware(memory=1e8)) is None


def test_cheapest_fits_and_nothing_that_fits_is_cheaper() -> None:
    from disco_ds.planner.solve import settings

    hardware = Hardware(memory=3e9)
    wanted = request_of(global_batch_size=8 * 512)
    best = cheapest(wanted, hardware)
    assert best is not None and best.fits
    others = [plan for s in settings(wanted) if (plan := make_plan(s, hardware)).fits]
    assert best.time.serial <= 1.001 * min(plan.time.serial for plan in others)


def test_remedy_keeps_the_engine() -> None:
    hardware = Hardware(memory=3e9)
    wanted = request_of(global_batch_size=8 * 4096)
    assert not make_plan(wanted, hardware).fits
    other = remedy(wanted, hardware)
    assert other is not None and other.fits
    assert other.request.strategy == wanted.strategy
    assert other.request.global_batch_size == wanted.global_batch_size


def test_loss_memory_of_the_peers_is_published() -> None:
    """Inf-CLIP's table, GB on 8 GPUs: 32k local 2.27, plain 16.67; 64k local 8.63."""
    gb = 1e9
    assert peer_loss_memory("disco_clip", 4096, 8, 768) / gb == pytest.approx(2.27, rel=0.25)
    assert peer_loss_memory("disco_clip", 8192, 8, 768) / gb == pytest.approx(8.63, rel=0.25)
    assert peer_loss_memory("open_clip", 4096, 8, 768) / gb == pytest.approx(16.67, rel=0.1)


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 * 2**30), ("80GB", 80e9), ("1.5 gib", 1.5 * 2**30)]
)
def test_sizes(text: str, size: float) -> None:
    assert parse_bytes(text, "--x") == size


def test_rates() -> None:
    assert parse_rate("25GB/s", "--x") == 25e9
    assert parse_rate("200Gbit/s", "--x") == 25e9
    assert parse_rate("200Gbps", "--x") == 25e9
    assert parse_flops("312T", "--x") == 312e12
    assert parse_flops("1e15", "--x") == 1e15


@pytest.mark.parametrize("text", ["40", "forty", "-40GiB", "0GiB", "40GiB/s", "40 XB"])
def test_nonsense_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"--gpu_memory"):
        parse_bytes(text, "--gpu_memory")


@pytest.mark.parametrize("text", ["25", "25GB", "fast", "0GB/s"])
def test_nonsense_rates(text: str) -> None:
    with pytest.raises(ValueError, match=r"--link"):
        parse_rate(text, "--link")


def test_the_meter_counts_storages_once_and_until_they_die() -> None:
    import torch

    with MemoryMeter() as meter:
        first = torch.zeros(1000)
        view = first[10:]
        assert meter.total == 4000
        with meter.phase("work", "temporary"):
            second = first + 1
            del first
            assert meter.total == 8000  # the view holds it
            del view, second
        assert meter.total == 0
    assert meter.peaks["work"].bytes == 8000
    assert meter.peaks["work"].parts == {"other": 4000, "temporary": 4000}


@pytest.mark.parametrize(
    ("row", "strategy"),
    [
        ("| stage 0, fp32 weights |", "zero0"),
        ("| stages 1 and 2 |", "zero2"),
        ("| stage 3 |", "zero3"),
        ("| stage 2 with offload |", "zero2_offload"),
    ],
)
def test_the_table_of_ds_configs_is_the_planners(row: str, strategy: str) -> None:
    from disco_ds.planner.engine_memory import engine_memory

    lines = (ROOT / "ds_configs" / "README.md").read_text().splitlines()
    cells = next(line for line in lines if line.startswith(row)).split("|")[2:-1]
    places = [(model, ranks) for model in ("ViT-B-32", "ViT-L-14") for ranks in (8, 64)]
    for cell, (model, ranks) in zip(cells, places, strict=True):
        request = PlanRequest(
            ModelConfig(model), 8 * ranks, ranks, micro_batch_size=4, strategy=strategy
        )
        engine = engine_memory(request, profile_of(request), like_cuda=True)
        lasting = sum(v for name, v in engine.at_rest.items() if name != "engine buffers")
        assert (lasting + engine.accumulated) / 2**30 == pytest.approx(float(cell), abs=0.012)
