"""FastCLIP in a whole run: tables are saved, continue to the last bit, and move to other ranks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from harness import run_distributed
from test_run import SAVED, STEPS, configuration, train_to_the_end

from disco_ds.config import TrainConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.metrics import read_metrics


def losses(folder: Path) -> list[tuple[float, ...]]:
    lines = [line for line in read_metrics(folder) if "loss" in line]
    return [(line["step"], line["loss"], line["surrogate_loss"]) for line in lines]


def tables(folder: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    last = folder / "checkpoints" / f"step_{STEPS:08d}"
    paths = [last / f"rank_{rank:05d}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=True)["loss"] for path in paths]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = configuration(tmp_path_factory.mktemp("fastclip"))
    loss = FastCLIPConfig(version="v2", gamma_decay_epochs=1.0)
    config = dataclasses.replace(config, loss=loss)
    run_distributed(train_to_the_end, config, world_size=2)
    return config


def stopped_copy(run: TrainConfig, folder: Path) -> TrainConfig:
    shutil.copytree(Path(run.run_dir or ""), folder)
    shutil.rmtree(folder / "checkpoints" / f"step_{STEPS:08d}")
    (folder / "checkpoints" / "latest").write_text(f"step_{SAVED:08d}\n")
    return dataclasses.replace(run, run_dir=str(folder), resume="latest")


def test_resume_equals_the_uninterrupted_run(run: TrainConfig, tmp_path: Path) -> None:
    whole, resumed = Path(run.run_dir or ""), tmp_path / "run"
    run_distributed(train_to_the_end, stopped_copy(run, resumed), world_size=2)
    assert losses(resumed) == losses(whole)
    for own, other in zip(tables(resumed, 2), tables(whole, 2), strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name], value) for name, value in other.items())
    # 6 steps of 16 pairs on 64 samples: one epoch and a half.
    assert sum(int(part["visits"].sum()) for part in tables(whole, 2)) == 16 * STEPS


def test_tables_follow_to_one_process(run: TrainConfig, tmp_path: Path) -> None:
    resumed = tmp_path / "run"
    run_distributed(train_to_the_end, stopped_copy(run, resumed), world_size=1)
    (alone,) = tables(resumed, 1)
    assert int(alone["visits"].sum()) == 16 * STEPS
    assert len(alone["visits"]) == 64


def test_metrics_name_both_losses(run: TrainConfig) -> None:
    lines = [line for line in read_metrics(Path(run.run_dir or "")) if "loss" in line]
    needed = {"surrogate_loss", "gamma", "tau_q50", "log_u_q50", "first_visits", "duplicate_rate"}
    assert all(needed <= line.keys() for line in lines)
    assert lines[0]["first_visits"] == 1.0
    assert lines[-1]["first_visits"] < 1.0
