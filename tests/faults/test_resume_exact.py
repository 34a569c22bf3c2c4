"""Resumed on the same ranks, every engine and hook continues to the last bit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_distributed
from processes import configuration, losses
from safetensors.torch import load_file

from disco_ds.checkpoint import CheckpointConfig, step_folder
from disco_ds.comm_hooks import CommHookConfig
from disco_ds.config import TrainConfig
from disco_ds.distributed import World
from disco_ds.evaluation.run import EvaluationConfig
from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.siglip import SigLIPConfig
from disco_ds.models import ModelConfig

STEPS, SAVED = 6, 3
COMPRESSED = CommHookConfig(name="fastclip", compress="bf16")


def fit(rank: int, world_size: int, config: TrainConfig) -> None:
    from disco_ds.run_plan import plan_run
    from disco_ds.trainer import Trainer

    world = World(rank, world_size, rank)
    trainer = Trainer(plan_run(config, world, run_name="test"), world)
    trainer.fit()
    if config.precision == "fp16":
        state = trainer.strategy.state().loss_scale
        assert state is not None and state["good_steps"] > 0
        if config.resume:
            assert trainer.counters.skipped_steps == 0 or state["value"] < 2.0**16
    trainer.close()


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    # Three ranks: a ring adds in an order that depends on where an element lies in its bucket.
    "ddp, 3 ranks": ("ddp", 3, {"global_batch_size": 18}),
    "ddp, compressed": ("ddp", 2, {"comm_hook": COMPRESSED}),
    "zero2, compressed": ("zero2", 2, {"comm_hook": COMPRESSED}),
    "fsdp2, compressed, micro-batches": (
        "fsdp2",
        2,
        {"comm_hook": COMPRESSED, "micro_batch_size": 3},
    ),
    "zero3, siglip": ("zero3", 2, {"loss": SigLIPConfig()}),
    "zero1, lion": ("zero1", 2, {"optim": {"name": "lion"}}),
    "ddp, fp16": ("ddp", 2, {"precision": "fp16"}),
    "zero2, bf16, sgdm": ("zero2", 2, {"precision": "bf16", "optim": {"name": "sgdm"}}),
    "zero2, BatchNorm": ("zero2", 2, {"model": ModelConfig("disco-demo-rn")}),
    "single, disco, lamb": ("single", 1, {"loss": DiscoConfig(), "optim": {"name": "lamb"}}),
}


QUICK = ("ddp, 3 ranks", "zero2, compressed", "ddp, fp16", "zero2, BatchNorm")


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_continues_to_the_last_bit(tmp_path: Path, case: str) -> None:
    strategy, world_size, changes = CASES[case]
    config = configuration(tmp_path, strategy, steps=STEPS)
    if "optim" in changes:
        changes = {**changes, "optim": dataclasses.replace(config.optim, **changes["optim"])}
    config = dataclasses.replace(config, **changes)
    run_distributed(fit, config, world_size=world_size)
    whole, resumed = Path(config.run_dir or ""), tmp_path / "resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(step_folder(resumed / "checkpoints", STEPS))
    (resumed / "checkpoints" / "latest").unlink()
    again = dataclasses.replace(config, run_dir=str(resumed), resume="latest")
    run_distributed(fit, again, world_size=world_size)
    assert losses(again) == losses(config)
    for name in ("model.safetensors", "optimizer.safetensors"):
        found = load_file(step_folder(resumed / "checkpoints", STEPS) / name)
        expected = load_file(step_folder(whole / "checkpoints", STEPS) / name)
        assert found.keys() == expected.keys()
        wrong = [key for key in expected if not torch.equal(found[key], expected[key])]
        assert not wrong, wrong
    for rank in range(world_size):
        file = f"rank_{rank:05d}.pt"
        found, expected = (
            torch.load(step_folder(f / "checkpoints", STEPS) / file, weights_only=True)
            for f in (resumed, whole)
        )
        assert found.keys() == {"random", "loss", "hook", "statistics"}
        for part in found:
            assert found[part].keys() == expected[part].keys()
            assert all(torch.equal(v, expected[part][k]) for k, v in found[part].items())


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_saving_and_evaluating_more_often_changes_no_bit(tmp_path: Path, strategy: str) -> None:
    """Or a run that was stopped and went on would differ from one that was not."""
    model = ModelConfig("disco-demo-rn")
    rare = configuration(tmp_path / "rare", strategy, steps=STEPS, model=model)
    rare = dataclasses.replace(rare, checkpoint=CheckpointConfig(every_steps=100))
    often = dataclasses.replace(
        rare,
        run_dir=str(tmp_path / "often" / "run"),
        checkpoint=CheckpointConfig(every_steps=1, keep_last=9),
        evaluation=EvaluationConfig(every_steps=1, retrieval=rare.data.shards, batch_size=16),
    )
    ends = []
    for config in (rare, often):
        run_distributed(fit, config, world_size=2)
        ends.append(step_folder(Path(config.run_dir or "") / "checkpoints", STEPS))
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(end / name) for end in ends)
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
