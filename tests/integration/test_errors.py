"""Wrong input: one line on every rank, before any work, naming what is wrong and the remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run_distributed
from test_run import ROOT, configuration

from disco_ds.config import TrainConfig
from disco_ds.data.config import DataConfig
from disco_ds.distributed import AgreedError, World
from disco_ds.evaluation.run import EvaluationConfig
from disco_ds.models import ModelConfig

Case = tuple[TrainConfig, str]


def cases(folder: Path) -> dict[str, Case]:
    good = configuration(folder)
    pattern = good.data.shards[0]
    text = folder / "page.tar"
    text.write_text("<html>not found</html>")
    taken = folder / "taken"
    taken.mkdir()
    (taken / "metrics.jsonl").write_text("{}\n")

    def ds_json(name: str, content: object) -> str:
        path = folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    def changed(**values: object) -> TrainConfig:
        return dataclasses.replace(good, **values)

    def shards(*names: str) -> DataConfig:
        return dataclasses.replace(good.data, shards=names)

    return {
        "no such shard": (changed(data=shards(str(folder / "none.tar"))), r"none\.tar"),
        "no such pattern": (
            changed(data=shards(str(folder / "shards/{00007..00009}.tar"))),
            r"0000[7-9]",
        ),
        "not a tar": (changed(data=shards(str(text))), r"page\.tar.*not a tar"),
        "no data": (changed(data=shards()), r"--data\.shards"),
        "unknown model": (
            changed(model=ModelConfig("disco-demo-vitt")),
            r"--model\.name disco-demo-vitt: .*nearest: disco-demo-vit$",
        ),
        "no deepspeed json": (
            changed(deepspeed_config="nowhere.json"),
            r"--deepspeed_config nowhere\.json: cannot read it \(No such file",
        ),
        "broken deepspeed json": (
            changed(deepspeed_config=ds_json("broken.json", '{"zero_optimization": ')),
            r"broken\.json: not JSON: .* line 1, column",
        ),
        "other batch size": (
            changed(deepspeed_config=ds_json("batch.json", {"train_batch_size": 64})),
            r'batch\.json: "train_batch_size" is 64, but --global_batch_size 16 on 2 ranks is 8',
        ),
        "a captioner": (
            changed(model=ModelConfig("coca_ViT-B-32")),
            r"--model.name coca_ViT-B-32: CoCa's decoder learns from a captioning loss",
        ),
        "odd batch": (
            changed(global_batch_size=17),
            r"--global_batch_size 17 does not divide by 2 ranks: use 16 or 18",
        ),
        "run folder taken": (
            changed(run_dir=str(taken)),
            r"--run_dir .*taken exists: add --resume latest",
        ),
        "not writable": (
            changed(run_dir=str(text / "run")),
            r"--run_dir .*page\.tar/run: cannot write there",
        ),
        "resume from nothing": (
            changed(resume=str(folder / "no_run")),
            r"--resume .*no_run: no complete checkpoint there",
        ),
        "no zero-shot set": (
            changed(evaluation=EvaluationConfig(zero_shot=(str(folder),))),
            r"zero-shot set .*classnames\.txt",
        ),
        "no retrieval set": (
            changed(evaluation=EvaluationConfig(retrieval=(str(folder / "gone.tar"),))),
            r"gone\.tar",
        ),
        "too little data": (
            changed(global_batch_size=128, micro_batch_size=None),
            r"64 samples in 4 shards cannot fill one global batch of 128",
        ),
        "two ranks, no engine": (
            changed(strategy="single", deepspeed_config=None),
            r"2 (ranks|processes)",
        ),
        "good": (changed(data=shards(pattern)), ""),
    }


def _plan_all(rank: int, world_size: int, all_cases: dict[str, Case]) -> None:
    from disco_ds.run_plan import plan_run

    world = World(rank, world_size, rank)
    for name, (config, message) in all_cases.items():
        if not message:
            plan_run(config, world, run_name="test")
            continue
        found = ""
        try:
            plan_run(config, world, run_name="test")
        except AgreedError as error:
            found = str(error)
        assert re.search(message, found), f"{name}: {found!r}"
        assert "\n" not in found, name


def test_every_rank_refuses_with_the_same_line(tmp_path: Path) -> None:
    run_distributed(_plan_all, cases(tmp_path), world_size=2)


def launch(*arguments: str, launcher: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / "train.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


PYTHON = [sys.executable]
DEEPSPEED = [
    str(Path(sys.executable).with_name("deepspeed")),
    *("--num_accelerators", "2", "--master_port", "29731"),
]


@pytest.mark.parametrize(
    ("launcher", "arguments", "message"),
    [
        (PYTHON, ["--preset", "demoo"], r"--preset demoo: unknown; did you mean demo\?"),
        (PYTHON, ["--steps", "1", "--device", "cpu"], r"--data\.shards"),
        (DEEPSPEED, ["--preset", "demo", "--optim.lrr", "1"], r"--optim\.lrr: unknown; did you"),
        (
            DEEPSPEED,
            ["--steps", "1", "--data.shards", "no/{0..3}.tar", "--deepspeed_config", "zero2.json"],
            r"zero2\.json: cannot read it",
        ),
    ],
)
def test_launchers_report_one_line_and_fail(
    launcher: list[str], arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = launch(*arguments, launcher=launcher, folder=tmp_path)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert re.search(message, lines[0])
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_training_stops_before_saving_when_the_loss_is_not_finite(tmp_path: Path) -> None:
    """An infinite image makes the loss NaN: status 1, the reason, and nothing saved."""
    from disco_ds.run_plan import plan_run
    from disco_ds.trainer import Trainer, TrainingStopped

    config = dataclasses.replace(configuration(tmp_path, zero=False), steps=3)
    world = World()
    trainer = Trainer(plan_run(config, world, run_name="test"), world)
    transform = trainer.clip.encoders.clip.visual.conv1
    transform.weight.data.fill_(float("inf"))
    with pytest.raises(
        TrainingStopped, match=r"step 1: the loss is nan \(rank 0: .*--resume latest"
    ):
        trainer.fit()
    assert not (tmp_path / "run" / "checkpoints").exists()
