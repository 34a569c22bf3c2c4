"""What becomes of an evaluation during training: log, trackers, details, report."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from PIL import Image

from disco_ds.distributed import World
from disco_ds.evaluation.gallery import data_url
from disco_ds.evaluation.run import Evaluation, publish
from disco_ds.metrics import MetricsLog, read_metrics


def found() -> Evaluation:
    example = {
        "picture": data_url(Image.new("RGB", (9, 9), "blue")),
        "captions": ["a blue square"],
        "rank": 2,
        "answers": [{"caption": "a red square", "score": 0.5, "correct": False}],
    }
    return Evaluation(
        values={"eval/retrieval/image_to_text_R@1": 0.5, "eval/zero_shot_pets/top1": 0.25},
        zero_shot={
            "pets": {
                "classes": ["cat", "dog"],
                "total": [2, 2],
                "correct": [1, 0],
                "confusions": [{"truth": "dog", "answer": "cat", "count": 2, "share": 1.0}],
            }
        },
        retrieval={"retrieval": {"image_to_text": {"best": [], "worst": [example]}}},
    )


def logged(run_dir: Path, evaluation: Evaluation, world: World | None = None) -> None:
    world = world or World()
    log = MetricsLog(run_dir, world, first_step=0)
    publish(evaluation, log, run_dir, 7, world)
    log.close()


def test_numbers_pictures_details_and_report(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(tmp_path, found())
    assert read_metrics(tmp_path) == [{"step": 7, **found().values}]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Images("eval/retrieval/image_to_text_worst")] == [7]
    details = json.loads((tmp_path / "evaluations" / "step_00000007.json").read_text())
    assert details["zero_shot"] == found().zero_shot
    text = (tmp_path / "report.html").read_text()
    for part in ("After step 7", "a blue square", "a red square", "pets: what is taken for what"):
        assert part in text


def test_other_ranks_and_empty_evaluations_leave_nothing(tmp_path: Path) -> None:
    logged(tmp_path, found(), World(rank=1, world_size=2))
    logged(tmp_path, Evaluation())
    assert not (tmp_path / "evaluations").exists()
    assert not (tmp_path / "report.html").exists()


def test_what_cannot_be_written_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("disco_ds"), "propagate", True)
    (tmp_path / "evaluations").touch()
    (tmp_path / "report.html").mkdir()
    logged(tmp_path, found())
    assert len(read_metrics(tmp_path)) == 1
    assert "step_00000007.json: not written" in caplog.text
    assert "no report" in caplog.text
