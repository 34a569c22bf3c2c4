"""Whole training side by side with open_clip_train: samples per second, memory, loss curves.

    python tools/bench/training.py [--rounds 3] [--steps 120] [--batch 64]

Two ranks on this machine train the same model (``disco-demo-rn``, or any open_clip model with
``--model``) on the same shards, at the same batch, precision (fp32), optimizer, schedule and number
of data workers, by turns, with another seed in each round:

* open_clip: ``torchrun -m open_clip_train.main``, ``--local-loss --gather-with-grad``, DDP;
* ours: ``torchrun train.py --strategy ddp``;
* ours, zero2: ``deepspeed train.py --deepspeed_config ds_configs/zero2.json``.

Both print a line after every step; a line's arrival is the clock, the first steps are left out.
Processor time is that of all processes of a run, data workers included: a busy machine hardly
changes it.
Memory is the largest sum of unique memory (USS) over all processes of a run. open_clip_train pins
an old webdataset: it gets one of its own under ``data/bench``. On a CPU its ``device_ids`` are left
out of DDP's arguments, which takes none there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from plots import keep_curves
from tables import environment, show, write_csv

from disco_ds.data.demo import NUM_TRAIN_SHARDS, ensure_demo
from disco_ds.presets import DEMO_DATA

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
CONFIGS = ROOT / "disco_ds" / "model_configs"
RANKS, WARM = 2, 20
SHARDS = str(DEMO_DATA / "train" / f"{{00000..{NUM_TRAIN_SHARDS - 1:05d}}}.tar")
OUR_SCRIPT = (str(ROOT / "train.py"),)
THEIR_SCRIPT = (str(Path(__file__).with_name("open_clip_main.py")),)
# What open_clip_train pins and this project does not, in a folder of its own.
THEIR_PACKAGES = ("webdataset==0.2.86", "pandas", "python-dateutil", "pytz", "tzdata", "six")
THEIR_FOLDER = ROOT / "data" / "bench" / "open_clip_train"


def install_theirs() -> None:
    """Once: packages that open_clip_train needs in other releases than this project."""
    if not THEIR_FOLDER.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(THEIR_FOLDER), *THEIR_PACKAGES], check=True)


@dataclass
class Timing:
    """What one run showed."""

    losses: dict[int, float] = field(default_factory=dict)
    arrivals: dict[int, float] = field(default_factory=dict)
    memory: int = 0
    """Bytes."""
    processor: list[tuple[int, float]] = field(default_factory=list)
    """Steps begun and seconds used by then, about once a second."""

    def rate(self, batch: int) -> float:
        """Samples per second after the first steps."""
        steps = sorted(step for step in self.arrivals if step >= WARM)
        seconds = self.arrivals[steps[-1]] - self.arrivals[steps[0]]
        return batch * RANKS * (len(steps) - 1) / seconds

    def processor_ms(self) -> float:
        """Processor milliseconds of a step, by all processes together; NaN of a run too short."""
        counted = [at for at in self.processor if at[0] >= WARM]
        if len(counted) < 2:
            return math.nan
        first, begin = counted[0]
        last, end = max(counted, key=lambda at: at[1])  # less is left once processes are gone
        return 1e3 * (end - begin) / max(last - first, 1)


def their_command(
    options: argparse.Namespace, folder: Path, script: Sequence[str] = THEIR_SCRIPT
) -> list[str]:
    """open_clip_train on two ranks."""
    samples = options.steps * options.batch * RANKS
    arguments = [
        str(CONFIGS),
        *("--train-data", SHARDS, "--dataset-type", "webdataset"),
        *("--train-num-samples", str(samples), "--epochs", "1", "--model", options.model),
        *("--batch-size", str(options.batch), "--workers", str(options.workers)),
        *("--precision", "fp32", "--device", "cpu", "--dist-backend", "gloo"),
        *("--local-loss", "--gather-with-grad", "--lr", "1e-3", "--wd", "0.1", "--warmup", "50"),
        *("--log-every-n-steps", "1", "--save-frequency", "0", "--logs", str(folder / "logs")),
        *("--seed", str(options.seed)),
    ]
    (folder / "arguments.json").write_text(json.dumps(arguments))
    return [*_torchrun(script), str(folder / "arguments.json")]


def our_command(
    options: argparse.Namespace, folder: Path, engine: str, script: Sequence[str] = OUR_SCRIPT
) -> list[str]:
    """train.py on two ranks."""
    start = [*_torchrun(script), "--strategy", "ddp"]
    if engine == "zero2":
        start = [
            *(str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(RANKS)),
            *("--master_port", "29531", *script),
            *("--deepspeed_config", str(ROOT / "ds_configs" / "zero2.json")),
        ]
    return [
        *start,
        *("--data.shards", SHARDS, "--data.num_workers", str(options.workers)),
        *("--model.name", options.model, "--global_batch_size", str(options.batch * RANKS)),
        *("--seed", str(options.seed), "--steps", str(options.steps)),
        *("--optim.lr", "1e-3", "--optim.weight_decay", "0.1"),
        *("--optim.warmup_steps", "50", "--log_every_steps", "1", "--device", "cpu"),
        *("--run_dir", str(folder / f"run-{time.time_ns()}")),
        *("--checkpoint.every_steps", "1000000"),
    ]


def _torchrun(script: Sequence[str]) -> list[str]:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    return [torchrun, "--nproc_per_node", str(RANKS), "--master_port", "29530", *script]


LINES = {
    "theirs": re.compile(r"Train Epoch: \d+ \[\s*(\d+)/.*?Loss: ([\d.]+)"),
    "ours": re.compile(r"step (\d+)/\d+ +loss ([\d.]+)"),
}


def run(command: Sequence[str], kind: str, batch: int) -> Timing:
    """Start a training, read its lines as they come, watch its memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    if kind == "theirs":
        environment["PYTHONPATH"] = str(THEIR_FOLDER)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    timing = Timing()
    tail: list[str] = []
    watcher = threading.Thread(target=_watch, args=(process, timing))
    watcher.start()
    assert process.stdout is not None
    for line in process.stdout:
        tail = [*tail[-80:], line]
        if match := LINES[kind].search(line):
            step = int(match[1])
            if kind == "theirs":  # samples seen, before a batch is added
                step = step // (batch * RANKS)
            timing.arrivals[step], timing.losses[step] = time.perf_counter(), float(match[2])
    watcher.join()
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed:\n{''.join(tail)}")
    return timing


def _watch(process: subprocess.Popen[str], timing: Timing) -> None:
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            family = [parent, *parent.children(recursive=True)]
            total = sum(member.memory_full_info().uss for member in family)
            timing.memory = max(timing.memory, total)
            used = [member.cpu_times() for member in family]
            seconds = sum(times.user + times.system for times in used)
            timing.processor.append((max(timing.arrivals, default=0), seconds))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            pass
        time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="disco-demo-rn")
    parser.add_argument("--batch", type=int, default=64, help="pairs per rank")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 30
    install_theirs()
    ensure_demo(DEMO_DATA)
    found: dict[str, list[Timing]] = {"open_clip": [], "ours": [], "ours, zero2": []}
    folder = Path(tempfile.mkdtemp(prefix="bench-training-"))
    try:
        for seed in range(options.rounds):
            options.seed = seed
            theirs = their_command(options, folder)
            found["open_clip"].append(run(theirs, "theirs", options.batch))
            for name, engine in (("ours", "ddp"), ("ours, zero2", "zero2")):
                command = our_command(options, folder, engine)
                found[name].append(run(command, "ours", options.batch))
    finally:
        shutil.rmtree(folder)
    report(found, options)


def report(found: dict[str, list[Timing]], options: argparse.Namespace) -> None:
    """Print the table; keep it unless it was quick."""
    base = [timing.rate(options.batch) for timing in found["open_clip"]]
    rows: list[dict[str, Any]] = []
    for name, timings in found.items():
        rates = [timing.rate(options.batch) for timing in timings]
        ratios = [own / other for own, other in zip(rates, base, strict=True)]
        last = [statistics.mean(list(timing.losses.values())[-10:]) for timing in timings]
        rows.append(
            {
                "what": name,
                "samples_per_second": round(statistics.median(rates), 1),
                "min": round(min(rates), 1),
                "max": round(max(rates), 1),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "processor_ms_per_step": round(
                    statistics.median(timing.processor_ms() for timing in timings), 1
                ),
                "memory_mib": round(max(timing.memory for timing in timings) / 2**20),
                "loss_last_10": round(statistics.mean(last), 3),
                "loss_sd": round(statistics.stdev(last), 3) if len(last) > 1 else "",
            }
        )
    show(rows)
    print(
        "in short: samples/s over open_clip's: "
        + ", ".join(
            f"{r['what']} {r['ratio']} ({r['ratio_min']} to {r['ratio_max']})" for r in rows
        )
    )
    if options.quick:
        return
    note = (
        f"{options.model}, {RANKS} x {options.batch} pairs, fp32, {options.workers} workers, "
        f"{options.steps} steps, {options.rounds} rounds in turn, {environment()}"
    )
    write_csv(RESULTS / "training.csv", rows, note)
    keep_curves("training", {n: [_curve(t) for t in timings] for n, timings in found.items()})


def _curve(timing: Timing) -> list[float]:
    """Losses in the order of steps."""
    return [loss for _, loss in sorted(timing.losses.items())]


if __name__ == "__main__":
    main()
