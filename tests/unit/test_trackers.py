"""Trackers: one axis over two lives of a run, nothing lost, and no failure stops anything."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from disco_ds.distributed import World
from disco_ds.metrics import (
    METRICS_FILE,
    MetricsLog,
    TrackingConfig,
    memory_use,
    pairs_picture,
    read_metrics,
    retrieval_picture,
    trackers,
)
from disco_ds.metrics.trackers import Guarded


class FakeServer:
    """W&B's memory: of a run it refuses what comes at a smaller step than it has seen."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.steps = -1
        self.axes: dict[str, str | None] = {}
        self.inits: list[dict[str, Any]] = []

    def module(self) -> types.ModuleType:
        fake = types.ModuleType("wandb")
        fake.init = self.init  # type: ignore[attr-defined]
        fake.Image = lambda picture: ("image", picture.size)  # type: ignore[attr-defined]
        return fake

    def init(self, **arguments: Any) -> FakeServer:
        self.inits.append(arguments)
        self.id = arguments["id"] or "new"
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        if step is not None and step < self.steps:
            return
        self.steps = max(self.steps, step or 0)
        self.rows.append(dict(values))

    def finish(self) -> None:
        self.steps += 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    fake = FakeServer()
    monkeypatch.setitem(sys.modules, "wandb", fake.module())
    yield fake


WANDB = TrackingConfig(tensorboard=False, wandb="project")


def life(run_dir: Path, steps: range, *, first_step: int, tracking: TrackingConfig = WANDB) -> None:
    log = MetricsLog(run_dir, World(), first_step=first_step, tracking=tracking, settings={"lr": 1})
    for step in steps:
        log.write(step, {"loss": step / 2})
        if step % 5 == 0:
            log.write(step, {"eval/top1": step / 10})
    log.close()


def test_wandb_over_two_lives_of_a_run(tmp_path: Path, server: FakeServer) -> None:
    """Logged to 7, saved at 5, resumed: every number arrives, on the axis of optimizer steps."""
    life(tmp_path, range(1, 8), first_step=0)
    life(tmp_path, range(6, 11), first_step=5)
    assert server.axes == {"step": None, "*": "step"}
    losses = [row["step"] for row in server.rows if "loss" in row]
    assert losses == [*range(1, 8), *range(6, 11)]
    assert [row["step"] for row in server.rows if "eval/top1" in row] == [5, 10]
    first, second = server.inits
    assert (first["id"], second["id"], second["resume"]) == (None, "new", "allow")
    assert (second["project"], second["config"]) == ("project", {"lr": 1})
    assert [line["step"] for line in read_metrics(tmp_path) if "loss" in line] == [*range(1, 11)]


class Monotonic:
    """A tracker that cannot stand a smaller step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.steps or step >= self.steps[-1]
        self.steps.append(step)

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        self.scalars(step, {})

    def close(self) -> None:
        pass


def test_no_tracker_gets_a_smaller_step(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Monotonic()
    guarded = Guarded("strict", lambda: tracker)
    for step in (1, 5, 3, 6):
        guarded.scalars(step, {})
        guarded.picture(step, "x", lambda: Image.new("RGB", (1, 1)))
    assert tracker.steps == [1, 1, 5, 5, 5, 5, 6, 6]
    assert "off" not in caplog.text


@pytest.mark.parametrize("moment", ["init", "log", "Image", "finish"])
def test_a_tracker_that_fails_is_left_out(
    tmp_path: Path,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    owner = server if moment in ("log", "finish") else sys.modules["wandb"]
    monkeypatch.setattr(owner, moment, fail)
    reports: list[str] = []
    monkeypatch.setattr(trackers.logger, "warning", lambda text, *args: reports.append(text % args))
    log = MetricsLog(tmp_path, World(), first_step=0, tracking=WANDB)
    for step in range(1, 4):
        log.write(step, {"loss": 1.0})
        log.picture(step, "x", lambda: Image.new("RGB", (2, 2)))
    log.close()
    assert len(read_metrics(tmp_path)) == 3
    assert reports == ["Weights & Biases is off from now on: no route"]


def test_a_missing_package_names_its_extra(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(logging.getLogger("disco_ds"), "propagate", True)
    life(tmp_path, range(1, 3), first_step=0)
    assert "wandb is missing: pip install 'disco_ds[tracking]'" in caplog.text
    assert len(read_metrics(tmp_path)) == 2


def test_a_full_disk_does_not_stop_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, _: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(logging.getLogger("disco_ds"), "propagate", True)
    log = MetricsLog(tmp_path, World(), first_step=0, tracking=TrackingConfig(tensorboard=False))
    log._file = Full()  # type: ignore[assignment]
    log.write(1, {"loss": 1.0})
    log.close()
    assert f"step 1 is missing from {METRICS_FILE}: [Errno 28] No space" in caplog.text


def example(rank: int) -> dict[str, Any]:
    from disco_ds.evaluation.gallery import data_url

    picture = data_url(Image.new("RGB", (20, 20), "red"))
    answers = [{"caption": f"a {n}", "score": 0.5, "correct": n == rank - 1} for n in range(3)]
    return {"picture": picture, "captions": ["a red square"], "rank": rank, "answers": answers}


def test_tensorboard_shows_pairs_and_retrievals(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    preprocess = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    log = MetricsLog(tmp_path, World(), first_step=0)
    images = torch.full((3, 3, 16, 16), 1.0)
    captions = ["one", "two", "three"]
    log.picture(1, "pairs", lambda: pairs_picture(images, captions, preprocess, limit=2))
    log.picture(2, "best", lambda: retrieval_picture([example(1), example(9)], limit=8))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert events.Tags()["images"] == ["pairs", "best"]
    (pairs,), (best,) = events.Images("pairs"), events.Images("best")
    assert (pairs.step, best.step) == (1, 2)
    assert (pairs.height, best.height) == (2 * 136 + 8, 2 * 136 + 8)


def test_pictures_show_what_they_should() -> None:
    images = torch.zeros(2, 3, 16, 16)
    images[1, 0] = 1.0
    picture = pairs_picture(
        images, ["a", "b"], {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}, limit=8
    )
    assert picture.getpixel((12, 12)) == (0, 0, 0)
    assert picture.getpixel((12, 148)) == (255, 0, 0)
    by_text = {
        "caption": "red",
        "rank": 1,
        "answers": [
            {"picture": example(1)["picture"], "caption": "red", "score": 1.0, "correct": True}
        ],
    }
    framed = retrieval_picture([by_text], limit=1)
    assert framed.getpixel((9, 9)) == (15, 123, 79)


def test_no_pictures_when_none_are_wanted(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, World(), first_step=0, tracking=TrackingConfig(pictures=0))
    log.picture(1, "x", lambda: pytest.fail("drawn"))
    log.close()


def test_memory_is_measured() -> None:
    found = memory_use(torch.device("cpu"))
    assert 2**20 < found["memory_bytes"] <= 1.5 * found["memory_peak_bytes"]


PROGRESS = """
import logging
from disco_ds.distributed import World, setup_logging
from disco_ds.metrics import Progress
setup_logging(World())
progress = Progress(World(), first_step=0, total_steps=100)
progress.update(40, "loss 2.345 (chance 4.852)  510 samples/s  3 skipped", seconds_left=3723)
logging.getLogger("disco_ds").warning("a warning")
progress.close()
"""


def test_lines_without_a_terminal() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True)
    assert result.stderr.splitlines() == [
        "step 40/100  loss 2.345 (chance 4.852)  510 samples/s  3 skipped  ETA 1:02:03",
        "a warning",
    ]


def test_a_live_bar_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    result = subprocess.run([sys.executable, "-c", PROGRESS], stderr=theirs, timeout=120)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # how a terminal says that its other side is gone
        pass
    os.close(ours)
    assert result.returncode == 0
    text = shown.decode()
    for part in ("40%|", "40/100", "loss 2.345 (chance 4.852)  510 samples/s  3 skipped", "<"):
        assert part in text
    # The warning has a line of its own.
    assert "a warning" in text.replace("\r", "\n").split("\n")


def test_nan_reaches_the_log_as_null(tmp_path: Path, server: FakeServer) -> None:
    log = MetricsLog(tmp_path, World(), first_step=0, tracking=WANDB)
    log.write(1, {"loss": float("nan")})
    log.close()
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == {"step": 1, "loss": None}
