"""Every launcher for real: twenty steps of the demo, and a wrong flag ends in one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "deepspeed": (
        ["deepspeed", "--num_accelerators", "2", "--master_port", "29631"],
        ["--deepspeed_config", "ds_configs/zero2.json", "--comm_hook.name", "fastclip"],
    ),
    "torchrun ddp": (["torchrun", "--standalone", "--nproc_per_node", "2"], []),
    "torchrun fsdp2": (
        ["torchrun", "--standalone", "--nproc_per_node", "2"],
        ["--strategy", "fsdp2", "--precision", "bf16"],
    ),
    "torchrun accelerate": (
        ["torchrun", "--standalone", "--nproc_per_node", "2"],
        ["--strategy", "accelerate"],
    ),
    "accelerate": (
        ["accelerate", "launch", "--config_file", "launchers/accelerate/zero2.yaml"],
        ["--strategy", "accelerate"],
    ),
    "python": (["python3"], []),
    "python zero": (["python3"], ["--deepspeed_config", "ds_configs/zero3.json"]),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def launch(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher, own = LAUNCHERS[name]
    return subprocess.run(
        [str(BIN / launcher[0]), *launcher[1:], "train.py", "--preset", "demo", *own, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_twenty_steps(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = launch(name, "--steps", "20", "--run_dir", str(run))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert lines[-1]["step"] == 20 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_wrong_flag(name: str) -> None:
    done = launch(name, "--stps", "20")
    assert done.returncode != 0
    assert "error: --stps: unknown; did you mean --steps?" in done.stderr + done.stdout
