"""Infinite features on one rank in the third step: all ranks decide alike, nothing is touched."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from test_run import configuration

from disco_ds.config import TrainConfig
from disco_ds.distributed import World
from disco_ds.evaluation.run import EvaluationConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.metrics import PlateauWatch, read_metrics

BROKEN_STEP = 3


def broken_trainer(config: TrainConfig, world: World) -> Any:
    from disco_ds.run_plan import plan_run
    from disco_ds.trainer import Trainer

    trainer = Trainer(plan_run(config, world, run_name="test"), world)
    encode, calls = trainer.strategy.encode, [0]

    def poisoned(image: Any, text: Any) -> Any:
        features = encode(image, text)
        calls[0] += 1
        if calls[0] == BROKEN_STEP and world.rank == 1:
            return features[0] * torch.inf, features[1]
        return features

    trainer.strategy.encode = poisoned
    return trainer


def _skip(rank: int, world_size: int, config: TrainConfig) -> None:
    trainer = broken_trainer(config, World(rank, world_size, rank))
    trainer.fit()
    assert trainer.counters.skipped_steps == 1
    assert trainer.counters.step == config.steps
    visits = trainer.loss.table.read(torch.arange(64))["visits"]
    assert int(visits.sum()) == 16 * config.steps
    trainer.close()


def _stop(rank: int, world_size: int, config: TrainConfig) -> None:
    from disco_ds.trainer import TrainingStopped

    trainer = broken_trainer(config, World(rank, world_size, rank))
    with pytest.raises(TrainingStopped, match=r"step 3: the loss is nan \(rank 1: image features"):
        trainer.fit()
    trainer.close()


def _too_many(rank: int, world_size: int, config: TrainConfig) -> None:
    from disco_ds.trainer import TrainingStopped

    trainer = broken_trainer(config, World(rank, world_size, rank))
    with pytest.raises(TrainingStopped, match=r"1 optimizer steps in a row were skipped"):
        trainer.fit()
    trainer.close()


def _all(rank: int, world_size: int, configs: dict[str, TrainConfig]) -> None:
    _skip(rank, world_size, configs["skip"])
    _stop(rank, world_size, configs["stop"])
    _too_many(rank, world_size, configs["too_many"])


def test_all_ranks_decide_alike(tmp_path: Path) -> None:
    base = dataclasses.replace(
        configuration(tmp_path),
        loss=FastCLIPConfig(),
        micro_batch_size=None,
        steps=4,
        evaluation=EvaluationConfig(),
    )
    configs = {
        "skip": dataclasses.replace(base, nonfinite="skip", run_dir=str(tmp_path / "skip")),
        "stop": dataclasses.replace(base, run_dir=str(tmp_path / "stop")),
        "too_many": dataclasses.replace(
            base, nonfinite="skip", max_skipped_steps=0, run_dir=str(tmp_path / "many")
        ),
    }
    run_distributed(_all, configs, world_size=2)
    lines = [line for line in read_metrics(tmp_path / "skip") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    # The third batch was given up: the schedule and the count of steps went on as if it were not.
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert not (tmp_path / "stop" / "checkpoints").exists()


def test_plateau_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = PlateauWatch(3)
    with caplog.at_level(logging.WARNING, logger="disco_ds.metrics"):
        for loss in (4.85, 4.84, 3.0, 4.85, 4.86, 4.85, 4.85, 4.85):
            watch.watch(loss, 4.852)
    assert [record.message.count("at chance (4.852)") for record in caplog.records] == [1]
