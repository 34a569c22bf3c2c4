"""2 -> 1 -> 4 -> 2 ranks and from engine to engine: nothing of the state changes on the way.

Every step sees the whole data set, so that the loss does not depend on who reads which sample.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from harness import run_distributed
from processes import ROOT, configuration, losses
from safetensors.torch import load_file

from disco_ds.checkpoint import CheckpointConfig, find_checkpoint
from disco_ds.config import TrainConfig
from disco_ds.distributed import World
from disco_ds.optim import OptimConfig

WORLDS = (2, 1, 4, 2)
STEPS = 2  # of each leg
QUICK = [
    ("ddp", "single", "fsdp2", "zero3"),
]
FULL = [
    ("fsdp2", "zero1", "zero3", "ddp"),
    ("zero2",) * 4,
    ("ddp", "single", "ddp", "ddp"),
    ("fsdp2",) * 4,
    *(((name,) * 4) for name in ("zero0", "zero1", "zero3", "zero2_offload", "zero3_offload")),
    ("zero0", "fsdp2", "zero2", "zero3_offload"),
]


def with_strategy(config: TrainConfig, strategy: str) -> TrainConfig:
    zero = strategy.startswith("zero")
    return dataclasses.replace(
        config,
        strategy="auto" if zero else strategy,  # type: ignore[arg-type]
        deepspeed_config=str(ROOT / "ds_configs" / f"{strategy}.json") if zero else None,
    )


def _leg(rank: int, world_size: int, config: TrainConfig) -> None:
    """Load, compare with the files, train on."""
    from disco_ds.run_plan import plan_run
    from disco_ds.trainer import Trainer

    world = World(rank, world_size, rank)
    trainer = Trainer(plan_run(config, world, run_name="test"), world)
    if trainer.plan.checkpoint is not None:
        snapshot = trainer.state.snapshot()
        if rank == 0:
            _assert_equal(snapshot.model, trainer.plan.checkpoint / "model.safetensors")
            _assert_equal(snapshot.optimizer, trainer.plan.checkpoint / "optimizer.safetensors")
        table = trainer.loss.table.read(torch.arange(64))
        assert table["visits"].tolist() == [trainer.counters.step] * 64
    trainer.fit()
    trainer.close()


def _assert_equal(found: dict[str, torch.Tensor], path: Path) -> None:
    expected = load_file(path)
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, wrong


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = configuration(
        tmp_path_factory.mktemp("whole"),
        "single",
        steps=STEPS * len(WORLDS),
        global_batch_size=64,
        # A decaying schedule would look at the last step of each leg.
        optim=OptimConfig(lr=1e-3, warmup_steps=2, schedule="constant", max_grad_norm=1.0),
        checkpoint=CheckpointConfig(every_steps=STEPS),
    )
    run_distributed(_leg, config, world_size=1)
    return config


@pytest.mark.parametrize(
    "legs", [*QUICK, *(pytest.param(legs, marks=pytest.mark.slow) for legs in FULL)]
)
def test_chain(whole: TrainConfig, tmp_path: Path, legs: tuple[str, ...]) -> None:
    config = dataclasses.replace(whole, run_dir=str(tmp_path / "run"), resume="latest")
    for leg, (strategy, world_size) in enumerate(zip(legs, WORLDS, strict=True), start=1):
        one = dataclasses.replace(with_strategy(config, strategy), steps=STEPS * leg)
        run_distributed(_leg, one, world_size=world_size)
        folder = find_checkpoint(tmp_path / "run", "latest")
        assert folder is not None and folder.name == f"step_{STEPS * leg:08d}"
    found, expected = losses(config), losses(whole)
    assert found.keys() == expected.keys()
    # fp32 sums in another order, eight steps of Adam.
    assert all(abs(found[step] - expected[step]) < 1e-4 for step in expected)
