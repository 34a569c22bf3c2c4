"""Infinite pixels on one rank in the third step: all ranks decide alike, nothing is touched."""

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
from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.metrics import PlateauWatch, read_metrics
from disco_ds.refusal import Refusal, TrainingStopped
from disco_ds.run_state import Counters

BROKEN_STEP = 3


def broken_trainer(config: TrainConfig, world: World, broken_step: int = BROKEN_STEP) -> Any:
    from disco_ds.run_plan import plan_run
    from disco_ds.trainer import Trainer

    trainer = Trainer(plan_run(config, world, run_name="test"), world)
    encode, calls = trainer.strategy.encode, [0]

    def poisoned(image: Any, text: Any) -> Any:
        calls[0] += 1
        if calls[0] == broken_step and world.rank == 1:
            image = image * torch.inf
        return encode(image, text)

    trainer.strategy.encode = poisoned
    return trainer


def _skip(rank: int, world_size: int, config: TrainConfig) -> None:
    trainer = broken_trainer(config, World(rank, world_size, rank))
    trainer.fit()
    assert trainer.counters.skipped_steps == 1
    assert trainer.counters.step == config.steps
    visits = trainer.loss.table.read(torch.arange(64))["visits"]
    assert int(visits.sum()) == 16 * config.steps
    # BatchNorm's, to which the forward pass of the broken step has written.
    statistics = trainer.strategy.own_statistics()
    assert statistics and all(value.isfinite().all() for value in statistics.values())
    trainer.close()


def _skip_the_last_of_an_epoch(rank: int, world_size: int, config: TrainConfig) -> None:
    trainer = broken_trainer(config, World(rank, world_size, rank), 64 // config.global_batch_size)
    trainer.fit()
    trainer.close()
    if rank == 0:
        found = read_metrics(trainer.plan.run_dir)
        counts = {line["epoch"]: line["data/seen"] for line in found if "data/seen" in line}
        assert counts[1] == 64, counts


def _stop(rank: int, world_size: int, config: TrainConfig) -> None:
    trainer = broken_trainer(config, World(rank, world_size, rank))
    with pytest.raises(TrainingStopped, match=r"step 3: the loss is nan \(rank 1: image features"):
        trainer.fit()
    trainer.close()


def _too_many(rank: int, world_size: int, config: TrainConfig) -> None:
    trainer = broken_trainer(config, World(rank, world_size, rank))
    message = r"1 optimizer steps in a row were skipped .* the loss is nan \(rank 1: image features"
    with pytest.raises(TrainingStopped, match=message):
        trainer.fit()
    trainer.close()


def _temperature(rank: int, world_size: int, configs: dict[str, TrainConfig]) -> None:
    """Its gradient alone, in the third step: the encoders learn on, all ranks alike."""
    from disco_ds.run_plan import plan_run
    from disco_ds.trainer import Trainer

    world = World(rank, world_size, rank)
    for name in ("temperature", "temperature_stop"):
        trainer = Trainer(plan_run(configs[name], world, run_name="test"), world)
        scale = trainer.temperature.logit_scale
        seen: list[float] = []

        def break_third(gradient: torch.Tensor, seen: list[float] = seen) -> torch.Tensor:
            seen.append(float(gradient))
            is_broken = len(seen) == BROKEN_STEP and rank == 1
            return gradient * torch.nan if is_broken else gradient

        scale.register_hook(break_third)
        if name == "temperature":
            trainer.fit()
            assert trainer.counters.step == 4 and scale.isfinite()
        else:
            message = r"step 3: the temperature's gradient is not finite \(rank 1: logit_scale\)"
            with pytest.raises(TrainingStopped, match=message):
                trainer.fit()
        trainer.close()


def _all(rank: int, world_size: int, configs: dict[str, TrainConfig]) -> None:
    _skip(rank, world_size, configs["skip"])
    _skip_the_last_of_an_epoch(rank, world_size, configs["last"])
    _stop(rank, world_size, configs["stop"])
    _too_many(rank, world_size, configs["too_many"])
    _temperature(rank, world_size, configs)


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
        "last": dataclasses.replace(base, nonfinite="skip", run_dir=str(tmp_path / "last")),
        "stop": dataclasses.replace(base, run_dir=str(tmp_path / "stop")),
        "too_many": dataclasses.replace(
            base, nonfinite="skip", max_skipped_steps=0, run_dir=str(tmp_path / "many")
        ),
        "temperature": dataclasses.replace(
            base, nonfinite="skip", loss=DiscoConfig(), run_dir=str(tmp_path / "temperature")
        ),
        "temperature_stop": dataclasses.replace(
            base, loss=DiscoConfig(), run_dir=str(tmp_path / "temperature_stop")
        ),
    }
    run_distributed(_all, configs, world_size=2)
    lines = [line for line in read_metrics(tmp_path / "skip") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    # The third batch was given up: the schedule and the count of steps went on as if it were not.
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert not (tmp_path / "stop" / "checkpoints").exists()


def test_fp16_looks_for_the_tensor_when_it_gives_up(tmp_path: Path) -> None:
    """Overflow is usual there: a step taken again each time would be dear."""
    config = dataclasses.replace(configuration(tmp_path), precision="fp16", max_skipped_steps=1)
    refusal, looks = Refusal(config, World(), Counters()), []

    def find_broken() -> list[str]:
        looks.append(1)
        return ["clip.visual.proj"]

    refusal.of_gradients(torch.inf, find_broken)
    assert not looks
    with pytest.raises(TrainingStopped, match=r"step 1: 2 .* overflowed .*rank 0: clip\.visual"):
        refusal.of_gradients(torch.inf, find_broken)


def test_plateau_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = PlateauWatch(3)
    with caplog.at_level(logging.WARNING, logger="disco_ds.metrics"):
        for loss in (4.85, 4.84, 3.0, 4.85, 4.86, 4.85, 4.85, 4.85):
            watch.watch(loss, 4.852)
    assert [record.message.count("at chance (4.852)") for record in caplog.records] == [1]
