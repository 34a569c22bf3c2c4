"""What a real run leaves behind by itself, at a good end and at a bad one."""

from __future__ import annotations

import json

from demo_run import ROOT, command, fastclip, two_ranks, workplace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from disco_ds.report.panels import charts
from disco_ds.report.record import read_run


def test_a_run_that_ends_well() -> None:
    folder = two_ranks()
    run = read_run(folder)
    assert (run.status, run.steps, run.total_steps) == ("done", 40, 40)
    assert (run.info["world_size"], run.info["strategy"]) == (2, "ddp")
    assert run.info["command"].split()[1:3] == ["--preset", "demo"]
    assert [path.name for path in sorted((folder / "evaluations").glob("step_*"))] == [
        "step_00000020.json",
        "step_00000040.json",
    ]
    titles = {chart.title for chart in charts([run])}
    assert {"Loss", "Temperature", "Learning rate", "Throughput", "Memory"} <= titles
    assert "\u03b3" in {chart.title for chart in charts([read_run(fastclip())])}
    assert "what is taken for what" in (folder / "report.html").read_text()


def test_trackers_of_a_real_run() -> None:
    events = EventAccumulator(str(two_ranks() / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(2, 41, 2))
    assert [event.step for event in events.Images("train/pairs")] == [1]
    assert [event.step for event in events.Images("eval/retrieval/image_to_text_worst")] == [20, 40]
    assert [event.step for event in events.Scalars("eval/zero_shot_gender/top1")] == [20, 40]


def test_a_run_that_fails() -> None:
    """Two ranks whose loss is no number: the reason is in the report, once and for all."""
    two_ranks()
    result = command(
        str(ROOT / "train.py"),
        *("--preset", "demo", "--run_dir", "broken", "--device", "cpu", "--steps", "9"),
        *("--global_batch_size", "64", "--optim.lr", "1e20", "--optim.warmup_steps", "0"),
        ranks=2,
        expect=1,
    )
    folder = workplace() / "broken"
    outcome = json.loads((folder / "outcome.json").read_text())
    assert outcome["status"] == "failed"
    assert outcome["reason"] in result.stderr
    assert "loss" in outcome["reason"]
    assert outcome["reason"].split(" (")[0] in (folder / "report.html").read_text()
