"""Saving and loading a training state: time, pause of training, memory; beside DeepSpeed's own.

    python tools/bench/checkpoint.py [--model ViT-B-32] [--ranks 2] [--repeats 3]

Two gloo processes train one step under ZeRO-2 (fp32, torch's AdamW) and save the same state in
turn by

* ours: complete fp32 weights and moments in two safetensors files, flushed and checksummed;
* ours, background: the same; training waits until the state is in host memory;
* DeepSpeed: ``engine.save_checkpoint``, which is tied to two ranks and this stage, neither flushed
  nor checksummed;
* floor: one ``write`` and ``fsync`` of as many bytes as ours, by one process.

Loading: ours (verifies every byte) and ``engine.load_checkpoint``. Memory is the largest growth of
anonymous memory of a rank while it saves or loads, so that cached file pages do not count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from harness import run_distributed, start_forkserver
from tables import environment, show, write_csv

from disco_ds.checkpoint import (
    CheckpointConfig,
    CheckpointWriter,
    Snapshot,
    load_checkpoint,
    step_folder,
)
from disco_ds.distributed import World
from disco_ds.models import ModelConfig, create_clip
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import EngineState
from disco_ds.strategies.ds_config import RunNumbers, resolve_ds_config
from disco_ds.strategies.zero import ZeroStrategy

RESULTS = Path(__file__).parent / "results" / "checkpoint.csv"
SHARED = {"model": "", "model_config": "{}", "preprocess": {}, "epoch": 0.0}
MIB = 2**20


def anonymous_bytes() -> int:
    """Memory of this process that is not backed by files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


@contextmanager
def peak_growth(into: list[float]) -> Iterator[None]:
    """Append the largest growth of anonymous memory inside, in MiB, sampled every 5 ms."""
    before, peak, stop = anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        into.append(max(0, peak[0] - before) / MIB)


def trained_engine(model: str, world: World) -> ZeroStrategy:
    """An engine after one step, so that its moments exist."""
    numbers = RunNumbers(2 * world.world_size, world.world_size, 2, "fp32", None)
    config = resolve_ds_config("bench", {"zero_optimization": {"stage": 2}}, numbers)
    parts = create_clip(ModelConfig(model), seed=0)
    strategy = ZeroStrategy(world, ds_config=config)
    strategy.setup(parts.encoders, OptimConfig(lr=1e-4))
    image = torch.randn(2, 3, *parts.image_size)
    features = strategy.encode(image, parts.tokenize(["a", "b"]))
    with strategy.accumulate(), strategy.micro_batch(is_last=True):
        strategy.backward(torch.stack([f.sum() for f in features if f is not None]).sum())
    strategy.step(1e-4)
    return strategy


def save_ours(strategy: ZeroStrategy, folder: Path, *, background: bool) -> tuple[float, float]:
    """Seconds that training waits, and until the checkpoint counts."""
    config = CheckpointConfig(background=background)
    writer = CheckpointWriter(folder, config, strategy.world)
    begin = time.perf_counter()
    state = strategy.state()
    shared = {**SHARED, "optimizer_steps": state.optimizer_steps, "loss_scale": None}
    writer.save(Snapshot(1, state.parameters, state.moments, {}, shared))
    pause = time.perf_counter() - begin
    writer.finish()
    return pause, time.perf_counter() - begin


def load_ours(strategy: ZeroStrategy, folder: Path) -> None:
    snapshot = load_checkpoint(step_folder(folder, 1), strategy.world)
    strategy.load_state(EngineState(snapshot.model, snapshot.optimizer, 1, None))


def floor(folder: Path, num_bytes: int) -> float:
    """Seconds to write and flush so many bytes."""
    block = memoryview(os.urandom(16 * MIB))
    begin = time.perf_counter()
    with (folder / "raw").open("wb") as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def worker(rank: int, world_size: int, model: str, repeats: int, root: str, out: str) -> None:
    world = World(rank, world_size, rank)
    strategy = trained_engine(model, world)
    rows: list[list[object]] = []

    def measure(name: str, action: Callable[[Path], tuple[float, float]], keep: bool) -> Path:
        folder = Path(root) / name.replace(" ", "_")
        growth: list[float] = []
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True) if not keep else None
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        with peak_growth(growth):
            pause, total = action(folder)
        dist.barrier()
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        rows.append([name, pause, total, growth[0], size / MIB])
        return folder

    def timed(action: Callable[[], object]) -> tuple[float, float]:
        begin = time.perf_counter()
        action()
        dist.barrier()
        return (time.perf_counter() - begin,) * 2

    def timing_of(action: Callable[[], object]) -> Callable[[Path], tuple[float, float]]:
        return lambda folder: timed(action)

    for _ in range(repeats):
        ours = measure("ours", lambda f: save_ours(strategy, f, background=False), False)
        measure("ours background", lambda f: save_ours(strategy, f, background=True), False)
        theirs = measure(
            "deepspeed", lambda f: timed(lambda: strategy.engine.save_checkpoint(f)), False
        )
        reload_ours = partial(load_ours, strategy, ours)
        reload_theirs = partial(strategy.engine.load_checkpoint, theirs)
        measure("load ours", timing_of(reload_ours), True)
        measure("load deepspeed", timing_of(reload_theirs), True)
        if world.is_main:
            num_bytes = sum(p.stat().st_size for p in ours.rglob("*") if p.is_file())
            seconds = floor(Path(root), num_bytes)
            rows.append(["floor", seconds, seconds, 0.0, num_bytes / MIB])
        dist.barrier()
    torch.save(rows, f"{out}-{rank}")


def summary(rows: list[list[list[object]]]) -> list[dict[str, object]]:
    """Median and range over repeats; memory of the rank that needs most."""
    table = []
    for name in dict.fromkeys(str(row[0]) for row in rows[0]):
        of_main = [row for row in rows[0] if row[0] == name]
        everyone = [row for rank in rows for row in rank if row[0] == name]
        pauses, totals = ([float(str(row[i])) for row in of_main] for i in (1, 2))
        table.append(
            {
                "what": name,
                "pause_s": round(statistics.median(pauses), 2),
                "total_s": round(statistics.median(totals), 2),
                "total_min_s": round(min(totals), 2),
                "total_max_s": round(max(totals), 2),
                "memory_mib": round(max(float(str(row[3])) for row in everyone)),
                "size_mib": round(float(str(of_main[-1][4]))),
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a small model, once")
    options = parser.parse_args()
    if options.quick:
        options.model, options.repeats = "disco-demo-vit", 1
    start_forkserver()
    with tempfile.TemporaryDirectory() as root:
        arguments = (options.model, options.repeats, root, f"{root}/rows")
        run_distributed(worker, *arguments, world_size=options.ranks, timeout=3600)
        rows = [torch.load(f"{root}/rows-{rank}") for rank in range(options.ranks)]
    table = summary(rows)
    show(table)
    print("in short: seconds: " + ", ".join(f"{row['what']} {row['total_s']}" for row in table))
    if not options.quick:
        engine = f"deepspeed {version('deepspeed')}"
        note = f"{options.model}, {options.ranks} ranks, {engine}, {environment()}"
        write_csv(options.output, table, note)


if __name__ == "__main__":
    main()
