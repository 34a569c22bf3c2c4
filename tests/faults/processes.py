"""Runs of train.py as processes that tests may signal, stop or kill, one fork each."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from shards import write_shards

from disco_ds.checkpoint import CheckpointConfig, as_plain
from disco_ds.config import TrainConfig
from disco_ds.data.config import DataConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.metrics import read_metrics
from disco_ds.models import ModelConfig
from disco_ds.optim import OptimConfig

ROOT = Path(__file__).parents[2]


def configuration(folder: Path, strategy: str, **changes: Any) -> TrainConfig:
    """A small FastCLIP run: 12 steps, a checkpoint every 3."""
    zero = strategy.startswith("zero")
    config = TrainConfig(
        data=DataConfig(shards=(write_shards(folder / "shards"),), num_workers=1),
        steps=12,
        global_batch_size=16,
        strategy="auto" if zero else strategy,  # type: ignore[arg-type]
        deepspeed_config=str(ROOT / "ds_configs" / f"{strategy}.json") if zero else None,
        model=ModelConfig("disco-demo-vit"),
        loss=FastCLIPConfig(),
        optim=OptimConfig(lr=1e-3, warmup_steps=2, max_grad_norm=1.0),
        checkpoint=CheckpointConfig(every_steps=3),
        run_dir=str(folder / "run"),
        log_every_steps=1,
        plan=False,
        device="cpu",
        timeout_seconds=60,
    )
    return dataclasses.replace(config, **changes)


def _entry(arguments: list[str], environment: Mapping[str, str], log: str) -> None:
    import torch

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if sabotage := environment.get("TEST_SABOTAGE"):
        import sabotages

        getattr(sabotages, sabotage)()
    from disco_ds.cli import train

    os._exit(train(arguments))


@dataclass
class Run:
    """The processes of one attempt."""

    config: TrainConfig
    processes: list[Any]
    logs: list[Path]
    started: float = field(default_factory=time.monotonic)

    def wait(self, timeout: float = 120) -> list[int]:
        """Exit statuses of all ranks; those that do not end in time are killed, and it fails."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        hanging = [p for p in self.processes if p.is_alive()]
        for process in hanging:
            process.kill()
            process.join()
        assert not hanging, f"still running after {timeout} s:\n{self.text()}"
        return [process.exitcode for process in self.processes]

    def text(self) -> str:
        """What all ranks said."""
        return "".join(log.read_text() for log in self.logs if log.exists())

    def until(self, condition: Callable[[], bool], timeout: float = 120) -> bool:
        """Wait until a condition holds; False when the run ended before."""
        deadline = time.monotonic() + timeout
        while not condition():
            if not all(process.is_alive() for process in self.processes):
                return False
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.002)
        return True

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def kill(self, rank: int) -> None:
        """kill -9."""
        self.signal(rank, signal.SIGKILL)


def start(
    config: TrainConfig,
    world_size: int,
    *,
    sabotage: str = "",
    environment: Mapping[str, str] | None = None,
    **flags: str,
) -> Run:
    """Start all ranks of a run; ``environment`` is for rank 0 alone."""
    folder = Path(config.run_dir or "").parent
    folder.mkdir(parents=True, exist_ok=True)
    attempt = len(list(folder.glob("attempt-*-0.log")))
    file = folder / f"attempt-{attempt}.json"
    file.write_text(json.dumps(as_plain(config)))
    arguments = ["--config", str(file)]
    arguments += [part for name, value in flags.items() for part in (f"--{name}", value)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder / f"attempt-{attempt}-{rank}.log" for rank in range(world_size)]
    processes = []
    for rank in range(world_size):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TEST_SABOTAGE": sabotage,
            **((environment or {}) if rank == 0 else {}),
        }
        process = get_context("forkserver").Process(
            target=_entry, args=(arguments, variables, str(logs[rank]))
        )
        process.start()
        processes.append(process)
    return Run(config, processes, logs)


def last_step(config: TrainConfig) -> int:
    """The newest step in the run's metrics."""
    folder = Path(config.run_dir or "")
    if not (folder / "metrics.jsonl").exists():
        return 0
    return max((int(line["step"]) for line in read_metrics(folder)), default=0)


def losses(config: TrainConfig) -> dict[int, float]:
    """Loss by step."""
    lines = read_metrics(Path(config.run_dir or ""))
    return {int(line["step"]): line["loss"] for line in lines if "loss" in line}
