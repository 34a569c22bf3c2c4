"""A whole run on real shards under ZeRO-2 with two ranks: resume, export, what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from harness import run_distributed
from safetensors.torch import load_file
from shards import write_shards

from disco_ds.checkpoint import CheckpointConfig, export
from disco_ds.config import TrainConfig, read_config
from disco_ds.data.config import DataConfig
from disco_ds.distributed import World
from disco_ds.evaluation.run import EvaluationConfig
from disco_ds.metrics import read_metrics
from disco_ds.models import ModelConfig, create_clip
from disco_ds.optim import OptimConfig

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 6, 4


def configuration(folder: Path, *, zero: bool = True) -> TrainConfig:
    pattern = write_shards(folder / "shards")
    return TrainConfig(
        data=DataConfig(shards=(pattern,), num_workers=1, shuffle_buffer=16),
        steps=STEPS,
        global_batch_size=16,
        micro_batch_size=3,
        deepspeed_config=str(ROOT / "ds_configs" / "zero2.json") if zero else None,
        model=ModelConfig("disco-demo-rn"),
        optim=OptimConfig(lr=1e-3, warmup_steps=2, max_grad_norm=1.0),
        evaluation=EvaluationConfig(every_steps=3, retrieval=(pattern,)),
        checkpoint=CheckpointConfig(every_steps=SAVED),
        run_dir=str(folder / "run"),
        log_every_steps=1,
        plan=False,
        device="cpu",
    )


def train_to_the_end(rank: int, world_size: int, config: TrainConfig) -> None:
    from disco_ds.run_plan import plan_run
    from disco_ds.trainer import Trainer

    world = World(rank, world_size, rank)
    plan = plan_run(config, world, run_name="test")
    trainer = Trainer(plan, world)
    trainer.fit()
    trainer.export()
    trainer.close()


def test_a_run_of_two_ranks_is_planned_and_measured(tmp_path: Path) -> None:
    """In the midst of a process group, beside data workers that are forked while it measures."""
    config = dataclasses.replace(
        configuration(tmp_path, zero=False), evaluation=EvaluationConfig(), plan=True
    )
    run_distributed(train_to_the_end, config, world_size=2)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    measured, predicted = (plan[key]["peak_memory_bytes"] for key in ("measured", "predicted"))
    assert measured == pytest.approx(predicted, rel=0.05)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = configuration(tmp_path_factory.mktemp("whole"))
    run_distributed(train_to_the_end, config, world_size=2)
    return config


def test_run_folder_is_complete(run: TrainConfig) -> None:
    folder = Path(run.run_dir or "")
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "ds_config.json", "metrics.jsonl", "tensorboard", "checkpoints"}
    assert read_config(folder / "config.json") == run
    ds_config = json.loads((folder / "ds_config.json").read_text())
    assert (ds_config["train_batch_size"], ds_config["gradient_clipping"]) == (16, 1.0)
    lines = [line for line in read_metrics(folder) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["samples_seen"] for line in lines] == [16 * n for n in range(1, STEPS + 1)]
    keys = {"loss", "chance_level", "logit_scale", "lr", "samples_per_second", "skipped_steps"}
    assert all(keys <= line.keys() for line in lines)
    evaluations = [
        line["step"] for line in read_metrics(folder) if "eval/retrieval/num_images" in line
    ]
    assert evaluations == [3, 6]
    # 64 samples are 4 steps of 16: the first epoch's account, and what the run saw of the second.
    epochs = [line for line in read_metrics(folder) if "data/seen" in line]
    assert [(line["step"], line["data/seen"], line["data/unseen"]) for line in epochs] == [
        (4, 64, 0),
        (6, 32, 32),
    ]


def test_an_evaluation_that_was_cut_off_is_made_up_for(run: TrainConfig, tmp_path: Path) -> None:
    """Stopped between the last save and the evaluation after it; a second resume adds nothing."""
    resumed = tmp_path / "run"
    shutil.copytree(Path(run.run_dir or ""), resumed)
    lines = read_metrics(resumed)
    kept = [line for line in lines if not (line["step"] == STEPS and "eval/" in str(line))]
    assert len(kept) < len(lines)
    (resumed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    config = dataclasses.replace(run, run_dir=str(resumed), resume="latest")
    for _ in range(2):
        run_distributed(train_to_the_end, config, world_size=2)
        assert read_metrics(resumed) == lines


def test_resumed_run_equals_the_uninterrupted_one(run: TrainConfig, tmp_path: Path) -> None:
    """Same losses to the last bit, same weights and moments, after a stop between two saves."""
    whole, resumed = Path(run.run_dir or ""), tmp_path / "run"
    shutil.copytree(whole, resumed)
    checkpoints = resumed / "checkpoints"
    shutil.rmtree(checkpoints / f"step_{STEPS:08d}")
    (checkpoints / "latest").write_text(f"step_{SAVED:08d}\n")
    config = dataclasses.replace(run, run_dir=str(resumed), resume="latest")
    run_distributed(train_to_the_end, config, world_size=2)

    def losses(folder: Path) -> list[tuple[float, ...]]:
        lines = [line for line in read_metrics(folder) if "loss" in line]
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]

    assert losses(resumed) == losses(whole)
    for name in ("model.safetensors", "optimizer.safetensors"):
        expected = load_file(whole / "checkpoints" / f"step_{STEPS:08d}" / name)
        found = load_file(checkpoints / f"step_{STEPS:08d}" / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_another_number_of_ranks_continues(run: TrainConfig, tmp_path: Path) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(Path(run.run_dir or ""), resumed)
    shutil.rmtree(resumed / "checkpoints" / f"step_{STEPS:08d}")
    (resumed / "checkpoints" / "latest").write_text(f"step_{SAVED:08d}\n")
    config = dataclasses.replace(run, run_dir=str(resumed), resume="latest")
    run_distributed(train_to_the_end, config, world_size=1)
    steps = [line["step"] for line in read_metrics(resumed) if "loss" in line]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_export_is_an_open_clip_file(run: TrainConfig, tmp_path: Path, ending: str) -> None:
    path = export(Path(run.run_dir or ""), tmp_path / f"model{ending}")
    open_clip.add_model_config(str(path.with_suffix(".json")))
    model = open_clip.create_model(path.stem, pretrained=str(path)).eval()
    final = load_file(Path(run.run_dir or "") / "checkpoints/step_00000006/model.safetensors")
    assert model.logit_scale.shape == ()
    assert model.state_dict().keys() == final.keys()
    encoders = create_clip(dataclasses.replace(run.model, init=str(path)), seed=3).encoders.eval()
    image, text = torch.randn(4, 3, 64, 64), encoders.clip.attn_mask.new_ones(4, 12).long()
    with torch.no_grad():
        own_image, own_text = encoders(image, text)
        torch.testing.assert_close(model.encode_image(image), own_image, rtol=0, atol=0)
        torch.testing.assert_close(model.encode_text(text), own_text, rtol=0, atol=0)


def test_epochs_end_where_they_were_asked_to_after_a_change_of_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """64 samples: 8 steps of 8 are an epoch, or 4 of 16."""
    config = dataclasses.replace(
        configuration(tmp_path, zero=False),
        steps=None,
        epochs=1.0,
        global_batch_size=8,
        evaluation=EvaluationConfig(),
    )
    train_to_the_end(0, 1, config)
    longer = dataclasses.replace(config, epochs=2.0, global_batch_size=16, resume="latest")
    train_to_the_end(0, 1, longer)
    steps = [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, 8 + 4 + 1))
    assert read_config(tmp_path / "run" / "config.json").resume is None
    caplog.clear()
    with caplog.at_level("WARNING", logger="disco_ds"):
        train_to_the_end(0, 1, longer)
    assert "nothing is left to train" in caplog.text


def test_single_process_runs_the_same_configuration(tmp_path: Path) -> None:
    config = dataclasses.replace(configuration(tmp_path, zero=False), steps=3)
    train_to_the_end(0, 1, config)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(losses) == 3


def test_a_resumed_run_counts_no_shard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from disco_ds.data import index as index_module
    from disco_ds.run_plan import plan_run

    config = dataclasses.replace(configuration(tmp_path, zero=False), evaluation=EvaluationConfig())
    first = plan_run(config, World(), run_name="test")
    assert (first.run_dir / "index.json").is_file()
    monkeypatch.setattr(index_module, "count_shard", lambda *_, **__: pytest.fail("read again"))
    again = plan_run(dataclasses.replace(config, resume="latest"), World(), run_name="test")
    assert again.index == first.index
