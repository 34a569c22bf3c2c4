"""Two real runs on the demo data, trained once per test session by the command line."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def workplace() -> Path:
    """A folder that lives as long as the session; commands run there."""
    folder = Path(tempfile.mkdtemp(prefix="disco-demo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def command(*words: str, ranks: int = 1, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script of this repository, or a command, in the workplace; torchrun starts several."""
    start = [sys.executable] if words[0].endswith(".py") else []
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start += [f"--nproc_per_node={ranks}"]
        start += [] if words[0].endswith(".py") else ["--no_python"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    result = subprocess.run(
        [*start, *words],
        cwd=workplace(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == expect, result.stderr[-3000:]
    return result


def disco_ds(*words: str, ranks: int = 1, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``disco-ds``."""
    script = Path(sys.executable).with_name("disco-ds")
    return command(str(script), *words, ranks=ranks, expect=expect)


@functools.cache
def two_ranks() -> Path:
    """Run folder of the demo on two ranks: 40 steps, evaluated at 20 and 40."""
    return _train("two", "--steps", "40", "--evaluation.every_steps", "20", ranks=2)


@functools.cache
def fastclip() -> Path:
    """Run folder of the demo with FastCLIP's loss in one process: it has a gamma."""
    return _train("fastclip", "--steps", "20", "loss:fastclip", "--loss.version", "v3")


def _train(name: str, *flags: str, ranks: int = 1) -> Path:
    settings = ("--global_batch_size", "64", "--optim.warmup_steps", "10", "--log_every_steps", "2")
    command(
        str(ROOT / "train.py"),
        *("--preset", "demo", "--run_dir", name, "--device", "cpu"),
        *settings,
        *flags,
        ranks=ranks,
    )
    return workplace() / name
