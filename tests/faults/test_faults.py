"""A rank that dies, sleeps, cannot write or computes nonsense: all ranks end alike, and say why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from processes import configuration, last_step, losses, start

from disco_ds.checkpoint import CheckpointConfig, find_checkpoint
from disco_ds.losses.disco import DiscoConfig

SLOW = pytest.mark.slow


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=SLOW), "zero3"])
def test_a_dead_rank_ends_the_others(tmp_path: Path, strategy: str) -> None:
    config = configuration(tmp_path, strategy, loss=DiscoConfig())
    run = start(config, 3, sabotage="die_in_step_3", global_batch_size="18")
    assert run.wait() == [1, 9, 1], run.text()
    for rank in (0, 2):
        text = run.logs[rank].read_text()
        assert f"error: rank {rank} in step 3, " in text, text
        assert "lost contact with another rank" in text


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero2", marks=SLOW)])
def test_a_sleeping_rank_ends_all_within_twice_the_timeout(tmp_path: Path, strategy: str) -> None:
    config = configuration(tmp_path, strategy, timeout_seconds=6)
    run = start(config, 2, sabotage="sleep_in_step_3")
    assert run.wait(timeout=60) == [1, 1], run.text()
    assert "error: rank 0 in step 3, " in run.logs[0].read_text()
    assert "error: rank 1 in step 3, waiting for data: no progress for" in run.logs[1].read_text()


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "zero2", "fsdp2"),
        *(pytest.param(name, marks=SLOW) for name in ("single", "zero0", "zero1", "zero3")),
    ],
)
def test_a_nan_gradient_on_one_rank(tmp_path: Path, strategy: str) -> None:
    """The loss is finite: the step is refused on all ranks and nothing changes by it."""
    world_size = 1 if strategy == "single" else 2
    sabotage = "nan_gradient_alone" if strategy == "single" else "nan_gradient_in_step_3"
    config = configuration(tmp_path, strategy, steps=5, loss=DiscoConfig())
    run = start(config, world_size, sabotage=sabotage)
    assert run.wait() == [1] * world_size, run.text()
    assert "error: step 3: the gradient norm is" in run.text()
    expected = f"(rank {world_size - 1}: clip.token_embedding.weight)"
    assert expected in run.text(), run.text()
    assert last_step(config) == 2
    skipping = dataclasses.replace(config, run_dir=str(tmp_path / "skip"), nonfinite="skip")
    run = start(skipping, world_size, sabotage=sabotage)
    assert run.wait() == [0] * world_size, run.text()
    assert "step 3 skipped: the gradient norm is" in run.text()
    assert expected in run.text(), run.text()
    assert sorted(losses(skipping)) == [1, 2, 3, 4, 5]


def test_disk_full_on_one_rank_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    for background in (False, True):
        folder = tmp_path / str(background)
        config = configuration(
            folder, "ddp", checkpoint=CheckpointConfig(every_steps=3, background=background)
        )
        run = start(config, 2, sabotage="disk_full_at_step_6")
        assert run.wait() == [1, 1], run.text()
        assert "cannot save the checkpoint" in run.text()
        assert "rank 1: [Errno 28] No space left on device" in run.text()
        assert "Earlier checkpoints are as they were" in run.text()
        found = find_checkpoint(Path(config.run_dir or ""), "latest")
        assert found is not None and found.name == "step_00000003"
        assert not list(found.parent.glob(".*"))
        run = start(config, 2, resume="latest")
        assert run.wait() == [0, 0], run.text()


def test_saves_by_time_and_what_is_kept(tmp_path: Path) -> None:
    by_time = configuration(
        tmp_path / "time",
        "ddp",
        checkpoint=CheckpointConfig(every_steps=1000, every_minutes=1e-6, keep_last=100),
    )
    by_step = configuration(
        tmp_path / "step",
        "ddp",
        checkpoint=CheckpointConfig(every_steps=1, keep_last=2, keep_every_steps=5),
    )
    for config, expected in ((by_time, range(1, 13)), (by_step, (5, 10, 11, 12))):
        run = start(config, 2)
        assert run.wait() == [0, 0], run.text()
        folders = (Path(config.run_dir or "") / "checkpoints").glob("step_*")
        assert sorted(int(f.name.removeprefix("step_")) for f in folders) == list(expected)


def test_ranks_that_see_different_checkpoints(tmp_path: Path) -> None:
    """Rank 1's view of the folder differs: one decision, no start from scratch."""
    config = configuration(tmp_path, "ddp", steps=3)
    assert start(config, 2).wait() == [0, 0]
    for sabotage, reason in (
        ("sees_no_checkpoint", "rank 1: --resume: this rank does not see"),
        ("sees_another_manifest", "rank 1 and rank 0 see different checkpoints"),
    ):
        run = start(config, 2, sabotage=sabotage, resume="latest", steps="6")
        assert run.wait() == [2, 2], run.text()
        assert reason in run.text(), run.text()


def test_latest_of_nothing_says_that_it_starts_fresh(tmp_path: Path) -> None:
    config = configuration(tmp_path, "single", steps=2)
    run = start(config, 1, resume="latest")
    assert run.wait() == [0]
    assert "no checkpoint in" in run.text() and "starting fresh" in run.text()


def test_another_loss_optimizer_or_model_is_named(tmp_path: Path) -> None:
    config = configuration(tmp_path, "single", steps=2)
    assert start(config, 1).wait() == [0]
    changes = {
        "the checkpoint's loss is fastclip, this run's is disco": {"loss": DiscoConfig()},
        "the checkpoint holds the moments of adamw": {
            "optim": dataclasses.replace(config.optim, name="lion")
        },
        "the checkpoint's model is disco-demo-vit": {
            "model": dataclasses.replace(config.model, name="disco-demo-rn")
        },
    }
    for reason, change in changes.items():
        other = dataclasses.replace(config, **change, steps=4)  # type: ignore[arg-type]
        run = start(other, 1, resume="latest")
        assert run.wait() == [2], run.text()
        assert reason in run.text(), run.text()
    files = list(tmp_path.glob("attempt-*.json"))
    assert json.loads(files[0].read_text())["model"]["name"]


def test_a_save_asked_for_by_one_rank(tmp_path: Path) -> None:
    config = configuration(
        tmp_path, "zero2", steps=4, checkpoint=CheckpointConfig(every_steps=100, keep_last=9)
    )
    run = start(config, 2, sabotage="saves_on_rank_1_in_step_2")
    assert run.wait() == [0, 0], run.text()
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert [f.name for f in folders] == ["step_00000002", "step_00000004"]


def test_fp16_that_overflows_at_the_smallest_scale(tmp_path: Path) -> None:
    config = configuration(tmp_path, "ddp", precision="fp16", loss=DiscoConfig())
    run = start(config, 2, sabotage="overflows_for_ever")
    assert run.wait() == [1, 1], run.text()
    assert "gradients overflow at the smallest loss scale; use --precision bf16" in run.text()
    assert "(rank 0: clip.positional_embedding; rank 1: clip.positional_embedding)" in run.text()
    assert last_step(config) == 0
