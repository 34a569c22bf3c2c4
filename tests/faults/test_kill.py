"""kill -9 at seeded moments, saves included: what is joined together equals one run."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

import pytest
import torch
from processes import Run, configuration, last_step, losses, start
from safetensors.torch import load_file

from disco_ds.checkpoint import CheckpointConfig, find_checkpoint
from disco_ds.config import TrainConfig


def kill_once(config: TrainConfig, moment: random.Random, *, in_save: bool) -> None:
    """Start the run, kill a random rank at a random moment, see all others fail."""
    run = start(config, 2, resume="latest")
    before = last_step(config)
    checkpoints = Path(config.run_dir or "") / "checkpoints"
    if in_save:
        steps = moment.randrange(1, 4)
        alive = run.until(lambda: last_step(config) >= before + steps)
        alive = alive and run.until(lambda: any(checkpoints.glob(".step_*")))
        time.sleep(moment.uniform(0.0, 0.02))
    else:
        steps = moment.randrange(3, 7)
        alive = run.until(lambda: last_step(config) >= before + steps)
        time.sleep(moment.uniform(0.0, 0.1))
    victim = moment.randrange(2)
    if alive and run.processes[victim].is_alive():
        run.kill(victim)
    statuses = run.wait()
    assert 0 not in statuses or statuses == [0, 0], run.text()
    _survivor_says_where(run, victim, statuses)


def _survivor_says_where(run: Run, victim: int, statuses: list[int]) -> None:
    if statuses[victim] == -9 and statuses[1 - victim] == 1:
        text = run.logs[1 - victim].read_text()
        assert f"rank {1 - victim} in step " in text, text
        assert "lost contact with another rank" in text, text


def check(folder: Path, strategy: str, *, kills: int, steps: int, background: bool) -> None:
    whole = configuration(
        folder / "whole",
        strategy,
        steps=steps,
        checkpoint=CheckpointConfig(every_steps=3, background=background),
    )
    assert start(whole, 2).wait() == [0, 0]
    torn = dataclasses.replace(whole, run_dir=str(folder / "torn" / "run"))
    moment = random.Random(0)
    for number in range(kills):
        kill_once(torn, moment, in_save=number % 2 == 1)
    run = start(torn, 2, resume="latest")
    assert run.wait() == [0, 0], run.text()
    assert losses(torn) == losses(whole)
    assert sorted(losses(torn)) == list(range(1, steps + 1))
    ends = [find_checkpoint(Path(c.run_dir or ""), "latest") for c in (torn, whole)]
    assert [end.name for end in ends if end] == [f"step_{steps:08d}"] * 2
    for name in ("model.safetensors", "optimizer.safetensors"):
        found, expected = (load_file(end / name) for end in ends if end)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    for rank in range(2):
        found, expected = (
            torch.load(end / f"rank_0000{rank}.pt", weights_only=True)["loss"]
            for end in ends
            if end
        )
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not list((Path(torn.run_dir or "") / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("strategy", "background"),
    [("zero2", False), pytest.param("fsdp2", True, marks=pytest.mark.slow)],
)
def test_two_kills(tmp_path: Path, strategy: str, background: bool) -> None:
    check(tmp_path, strategy, kills=2, steps=14, background=background)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_twenty_kills(tmp_path: Path, strategy: str, background: bool) -> None:
    check(tmp_path, strategy, kills=20, steps=75, background=background)
