"""``disco-ds plan`` as a user meets it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from disco_ds.planner.command import DOES_NOT_FIT, DONE, PlanCommand

SMALL = PlanCommand(
    gpus=8, gpu_memory="16GiB", model="disco-demo-vit", global_batch_size=4096, strategy="zero2"
)


def run(capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, str]:
    status = dataclasses.replace(SMALL, **changes).run()
    return status, capsys.readouterr().out


def refused(**changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        dataclasses.replace(SMALL, **changes).run()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys)
    assert status == DONE
    for part in (
        *("parameters", "master weights", "gradients", "optimizer", "activations, image"),
        *("activations, text", "features", "loss tiles", "inputs", "allocator slack"),
        *("at rest", "encode", "backward", "all_reduce", "all_gather", "time floor", "margin"),
        *("fits", "nothing was run or measured"),
    ):
        assert part in text, part


def test_what_does_not_fit_says_why_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, global_batch_size=8 * 8192, gpu_memory="3GiB")
    assert status == DOES_NOT_FIT
    assert "does not fit" in text and "largest part is activations" in text
    assert "what fits" in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run(capsys, as_json=True)
    found = json.loads(text)
    assert found["fits"] is True
    parts = found["memory"]["phases"][found["memory"]["peak_phase"]]
    assert sum(parts.values()) == pytest.approx(found["memory"]["peak_of_tensors"])
    hardware = found["hardware"]
    needed = found["memory"]["peak_of_tensors"] * (1 + hardware["slack"]) + hardware["reserved"]
    assert found["memory"]["needed"] == pytest.approx(needed)
    assert found["margin"] == pytest.approx(hardware["memory"] - needed)


def test_trace_beside_the_closed_forms(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, trace=True)
    assert status == DONE
    assert "simulated" in text and "whole step" in text
    assert "calls and bytes as predicted" in text


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, compare=True, activation_checkpointing=True)
    assert status == DONE
    for name in ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"):
        assert f"\n{name} " in text, name
    _, text = run(capsys, compare=True, precision="fp16")
    assert "\nzero0: " in text  # the run would refuse it, and so does the plan


def test_solve(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, solve=True, global_batch_size=8 * 8192, gpu_memory="8GiB")
    assert status == DONE
    assert "largest global batch with these settings" in text
    assert "cheapest setting for a global batch of 65536" in text
    status, _ = run(capsys, solve=True, global_batch_size=None)
    assert status == DONE


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "memory.png"
    _, text = run(capsys, plot=path)
    assert str(path) in text
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "--plot" in refused(plot=path / "memory.png")  # a file is no folder
    assert "--plot" in refused(plot=tmp_path / "memory.no_picture")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "ViT-B33"}, ("--model ViT-B33", "ViT-B-32")),
        ({"global_batch_size": 4097}, ("--global_batch_size 4097", "4096 or 4104")),
        ({"gpu_memory": "40"}, ("--gpu_memory 40", "40GiB")),
        ({"gpu_memory": "900MiB"}, ("--gpu_memory", "too small even for one pair", "of which")),
        ({"link": "fast"}, ("--link fast", "25GB/s")),
        ({"flops": "many"}, ("--flops many", "312T")),
        ({"mfu": 0.0}, ("--mfu 0",)),
        ({"gpus": 0}, ("--gpus 0",)),
        ({"strategy": "zero4"}, ("--strategy zero4", "zero3")),
        ({"strategy": "single"}, ("--strategy single", "--gpus 8")),
        ({"micro_batch_size": 0}, ("--micro_batch_size 0",)),
        ({"global_batch_size": None}, ("--global_batch_size", "--solve")),
        ({"global_batch_size": 0}, ("--global_batch_size 0",)),
        ({"tile_size": 0}, ("--tile_size 0",)),
        ({"optimizer": "lamb"}, ("lamb", "stage 2")),
        ({"gather": "ring", "gradient_reduction": "all_reduce"}, ("--gather ring",)),
        ({"strategy": "zero0", "precision": "fp16"}, ("torch_autocast", "fp16")),
        ({"gpu_memory": "1e400GB"}, ("--gpu_memory 1e400GB", "finite")),
        ({"link": "1e400GB/s"}, ("--link 1e400GB/s", "finite")),
        ({"flops": "1e400"}, ("--flops 1e400", "finite")),
        ({"reserved": "-1GiB"}, ("--reserved -1GiB",)),
        ({"solve": True, "compare": True}, ("--solve and --compare", "one at a time")),
        ({"compare": True, "trace": True}, ("--compare and --trace",)),
        ({"loss": "fastclip"}, ("--num_samples 0",)),
        ({"num_samples": 10}, ("--num_samples 10", "--loss fastclip")),
        ({"fastclip_version": "v2"}, ("--fastclip_version v2", "--loss fastclip")),
        (
            {"loss": "siglip", "gradient_reduction": "all_reduce"},
            ("--gradient_reduction all_reduce", "--loss disco"),
        ),
        ({"checkpoint_every": 3}, ("--checkpoint_every 3", "--activation_checkpointing")),
    ],
)
def test_refusals(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refused(**changes)
    for word in words:
        assert word in message


def test_nothing_reserved_and_a_lower_case_rate(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run(capsys, reserved="0B", link="100gbps", as_json=True)
    hardware = json.loads(text)["hardware"]
    assert (hardware["reserved"], hardware["link"]) == (0, 12.5e9)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_offload_is_what_the_file_says(
    strategy: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "own.json"
    zero: dict[str, Any] = {"stage": int(strategy[-1]), "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero}))
    other = f"{strategy}_offload"
    assert f"use --strategy {other}" in refused(deepspeed_config=path, strategy=strategy)
    _, text = run(capsys, deepspeed_config=path, strategy=other, as_json=True)
    assert "optimizer" in json.loads(text)["memory"]["host"]
    zero["offload_optimizer"] = {"device": "none"}
    path.write_text(json.dumps({"zero_optimization": zero}))
    assert f"use --strategy {strategy}" in refused(deepspeed_config=path, strategy=other)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero2", "zero3"])
def test_a_single_gpu_sends_nothing(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    changes: dict[str, Any] = {"gpus": 1, "global_batch_size": 64, "strategy": strategy}
    _, text = run(capsys, trace=True, **changes)
    assert "calls and bytes as predicted" in text


def test_a_deepspeed_file_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 10**6}}))
    _, text = run(capsys, deepspeed_config=path, as_json=True)
    calls = {
        e["phase"]: e["calls"] for e in json.loads(text)["traffic"] if e["phase"] == "backward"
    }
    assert calls["backward"] > 1  # small buckets
    assert "--strategy zero2" in refused(deepspeed_config=path, strategy="zero1")
    for question in ("solve", "compare"):
        assert f"--deepspeed_config {path}" in refused(deepspeed_config=path, **{question: True})
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": "512"}))
    assert str(path) in refused(deepspeed_config=path)
    hook = {"comm_hook": {"name": "nope"}}
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "disco": hook}))
    assert "nope" in refused(deepspeed_config=path)
    path.write_text('{"zero_optimisation": {}}')
    assert "zero_optimization" in refused(deepspeed_config=path)
