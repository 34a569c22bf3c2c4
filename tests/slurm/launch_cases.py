"""What the launcher's tests share: a small training, the command line, waiting for something."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "launchers" / "slurm.py"
PATIENCE_SECONDS = 240


def train_arguments(pattern: str, *, steps: int) -> list[str]:
    """Arguments of train.py: a small model on small shards, the same whatever runs it."""
    return [
        *("--data.shards", pattern, "--data.num_workers", "1", "--data.shuffle_buffer", "16"),
        *("--steps", str(steps), "--global_batch_size", "16", "--model.name", "disco-demo-vit"),
        *("--optim.lr", "1e-3", "--optim.warmup_steps", "2", "--checkpoint.every_steps", "1000"),
        *("--log_every_steps", "1", "--device", "cpu", "--timeout_seconds", "120"),
    ]


def launch(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None, status: int = 0
) -> str:
    """Run launchers/slurm.py; returns what it printed, checks how it ended."""
    done = subprocess.run(
        [sys.executable, str(LAUNCHER), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_for(condition: Callable[[], Any], what: str, *, folder: Path | None = None) -> Any:
    """Wait until a condition holds; the logs below ``folder`` explain a failure."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"no {what} after {PATIENCE_SECONDS} s\n{logs(folder)}")


def logs(folder: Path | None) -> str:
    """The ends of all logs below a run folder."""
    if folder is None:
        return ""
    files = sorted([*folder.rglob("*.log"), *folder.rglob("*.out"), *folder.rglob("events.tsv")])
    texts = (f"== {path}\n{path.read_text(errors='replace')[-1500:]}" for path in files)
    return "\n".join(texts)


def logged_steps(run: Path) -> list[int]:
    """Steps in metrics.jsonl that carry a loss."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    # The last line may be half written.
    contents = (json.loads(line) for line in lines if line.endswith("}"))
    return [content["step"] for content in contents if "loss" in content]


def final_weights(run: Path) -> dict[str, Any]:
    """The weights of the newest checkpoint."""
    from safetensors.torch import load_file

    newest = max((run / "checkpoints").glob("step_*"))
    weights: dict[str, Any] = load_file(newest / "model.safetensors")
    return weights


def assert_same_weights(one: Path, other: Path) -> None:
    """Bit for bit."""
    import torch

    expected, found = final_weights(one), final_weights(other)
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, f"{len(different)} of {len(expected)} differ, such as {different[0]}"
