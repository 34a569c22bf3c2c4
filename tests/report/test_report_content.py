"""What a report says: numbers, chance, differences, failures, and what it does with odd input."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from disco_ds.distributed import World
from disco_ds.report import (
    finish_run,
    record_start,
    refresh_report,
    reported,
    write_report,
)
from disco_ds.report.charts import Chart, Series, short, thin, ticks
from disco_ds.report.command import ReportCommand
from disco_ds.report.panels import chance_of, charts
from disco_ds.report.record import read_run
from disco_ds.report.tables import evaluation_tables, flatten, overview, plan_table


def write_run(folder: Path, *, steps: int = 6, top1: float = 0.5, rank: int = 4) -> Path:
    """A run folder with everything that a report can show."""
    folder.mkdir(parents=True)
    config = {
        "steps": 6,
        "global_batch_size": 64,
        "model": {"name": "disco-demo-rn"},
        "loss": {"name": "fastclip", "version": "v3"},
        "optim": {"name": "adamw", "lr": 1e-3},
        "data": {"shards": ["a.tar", "b.tar"]},
    }
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "samples_seen": 64 * step,
            "loss": 4.2 / step,
            "chance_level": math.log(64),
            "logit_scale": 14.0,
            "gamma": 1 - step / 10,
            "lr": 1e-3 / step,
            "samples_per_second": 100.0 + step,
            "memory_bytes": 2**30,
            "memory_peak_bytes": 2**31,
            "skipped_steps": 0,
        }
        for step in range(1, steps + 1)
    ]
    lines += [
        {"step": 3, "data/seen": 190, "data/unseen": 2, "data/skipped_bad_image": 1},
        {"step": 6, "data/seen": 180, "data/unseen": 12, "data/skipped_bad_image": 0},
        {
            "step": 6,
            "eval/retrieval/image_to_text_R@1": 0.25,
            "eval/retrieval/image_to_text_median_rank": rank,
            "eval/retrieval/num_images": 40,
            "eval/retrieval/num_texts": 40,
            "eval/zero_shot_pets/top1": top1,
            "eval/zero_shot_pets/chance": 0.1,
        },
    ]
    (folder / "config.json").write_text(json.dumps(config))
    text = "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= steps)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_every_curve_is_there(tmp_path: Path) -> None:
    titles = [chart.title for chart in charts([read_run(write_run(tmp_path / "run"))])]
    assert titles == [
        "Loss",
        "Temperature",
        "\u03b3",
        "Learning rate",
        "Throughput",
        "Memory",
        "Retrieval: image \u2192 text R@1",
        "Zero-shot pets: top-1",
    ]


def test_loss_is_drawn_against_chance(tmp_path: Path) -> None:
    (chart, *_) = charts([read_run(write_run(tmp_path / "run"))])
    data = json.loads(re.search(r'data-chart="(.*?)"', chart.svg).group(1).replace("&#34;", '"'))  # type: ignore[union-attr]
    loss, chance = data["series"]
    assert loss["points"] == [[float(step), 4.2 / step] for step in range(1, 7)]
    assert [y for _, y in chance["points"]] == [math.log(64)] * 2
    assert chance["label"] == "chance 4.159"


def test_evaluations_with_chance_and_differences(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "one")),
        read_run(write_run(tmp_path / "two", top1=0.6, rank=7)),
    ]
    retrieval, pets = evaluation_tables(runs)
    assert (retrieval.title, pets.title) == ("Retrieval", "Zero-shot pets")
    assert list(pets.columns) == ["chance", "one", "two"]
    (row,) = pets.rows
    assert [cell.text for cell in row.cells] == ["10.0\u00a0%", "50.0\u00a0%", "60.0\u00a0%"]
    assert (row.cells[2].delta, row.cells[2].kind) == ("+10.0", "better")
    ranks = next(row for row in retrieval.rows if "median" in row.label)
    assert (ranks.cells[2].delta, ranks.cells[2].kind) == ("+3", "worse")


@pytest.mark.parametrize(
    ("key", "chance"),
    [
        ("eval/retrieval/image_to_text_R@5", None),
        ("eval/retrieval/text_to_image_R@5", 0.05),
        ("eval/pets/top5", 0.5),
        ("eval/retrieval/num_images", None),
    ],
)
def test_chance(key: str, chance: float | None) -> None:
    values = {"eval/retrieval/num_images": 100, "eval/retrieval/num_texts": 500}
    assert chance_of(key, {**values, "eval/pets/chance": 0.1}) == chance


def test_data_and_plan(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    plan = {"predicted": {"peak_memory_bytes": 2**30}, "measured": {"peak_memory_bytes": 2**31}}
    (folder / "plan.json").write_text(json.dumps(plan))
    run = read_run(folder)
    assert run.data_account() == {
        "data/seen": 370,
        "data/unseen": 14,
        "data/skipped_bad_image": 1,
    }
    table = plan_table(run)
    assert table is not None
    assert [cell.text for cell in table.rows[0].cells] == ["1.000 GiB", "2.000 GiB", "+100.0 %"]
    text = write_report([folder], tmp_path / "report.html").read_text()
    for part in ("Skipped: bad image", "Planner: prediction and measurement", "2.000 GiB"):
        assert part in text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    """Written by the run itself, at its end; the next life starts without the old outcome."""
    folder = write_run(tmp_path / "run", steps=4)
    record_start(folder, World(), strategy="zero", total_steps=6)
    reason = "step 5: the loss is nan (rank 1: <image features>)"
    report = finish_run(folder, World(), "failed", reason)
    assert report == folder / "report.html"
    text = report.read_text()
    assert "step 5: the loss is nan (rank 1: &lt;image features&gt;)" in text
    assert "4 of 6" in text
    info = json.loads((folder / "run.json").read_text())
    assert info["versions"].keys() >= {"python", "torch", "deepspeed", "open_clip_torch"}
    assert (info["world_size"], info["strategy"]) == (1, "zero")
    assert info["versions"]["torch"] in text
    record_start(folder, World())
    assert read_run(folder).status == "unfinished"


def test_a_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    record_start(folder, World())
    report = finish_run(folder, World(), "failed", "no such shard")
    assert report is not None
    text = report.read_text()
    for part in ("no such shard", "No step was logged", "Nothing was evaluated"):
        assert part in text


def test_writing_a_report_never_raises_into_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("disco_ds.report.page.write_report", fail)
    assert finish_run(write_run(tmp_path / "run"), World(), "done") is None
    assert finish_run(tmp_path / "nowhere", World(), "done") is None
    assert finish_run(tmp_path, World(rank=1, world_size=2), "done") is None
    record_start(tmp_path / "nowhere", World())


class Asked(RuntimeError):
    """To stop."""


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "done"), (ValueError("bad\nstory"), "failed"), (Asked("SIGTERM"), "stopped")],
)
def test_every_end_is_reported(tmp_path: Path, error: Exception | None, status: str) -> None:
    """A run that fails before it wrote anything, too; the error goes on."""
    try:
        with reported(tmp_path, World(), stopped=(Asked,)):
            if error is not None:
                raise error
    except RuntimeError as raised:
        assert raised is error
    except ValueError as raised:
        assert raised is error
    run = read_run(tmp_path)
    reason = str(error).splitlines()[0] if error else ""
    assert (run.status, run.reason) == (status, reason)
    assert reason in (tmp_path / "report.html").read_text()


def test_the_report_of_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    assert refresh_report(folder, World(rank=1, world_size=2)) is None
    assert refresh_report(folder, World()) == folder / "report.html"
    assert "unfinished" in (folder / "report.html").read_text()


def test_odd_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "x.html")
    with pytest.raises(ValueError, match=r"is not a run folder \(there is no config.json"):
        write_report([tmp_path], tmp_path / "x.html")
    folder = write_run(tmp_path / "a" / "run")
    with pytest.raises(ValueError, match="cannot write the report"):
        write_report([folder], folder / "config.json" / "x.html")
    with pytest.raises(ValueError, match="name at least one run folder"):
        ReportCommand(()).run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": nonsense}\n{"step": 8, "lo')
    assert ReportCommand((folder,)).run() == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert read_run(folder).steps == 6


def test_evaluations_made_afterwards_stand_by_themselves(tmp_path: Path) -> None:
    """`disco-ds evaluate RUN -o RUN/evaluations/NAME.json`: numbers, source and pictures."""
    folder = write_run(tmp_path / "run")
    found = {
        "step": 4,
        "source": "runs/mine",
        "values": {"eval/retrieval/text_to_image_R@1": 0.125, "eval/retrieval/num_images": 8},
        "zero_shot": {"pets": {"confusions": [{"truth": "a cat"} | PETS]}},
    }
    path = folder / "evaluations" / "flickr.json"
    path.parent.mkdir(exist_ok=True)
    before = write_report([folder], tmp_path / "a.html").read_text()
    path.write_text(json.dumps(found))
    text = write_report([folder], tmp_path / "b.html").read_text()
    assert "evaluated as flickr" in text and "runs/mine" in text
    assert "12.5\u00a0%" in text and "a cat" in text
    assert before.count("at a closer look") == text.count("at a closer look")


PETS = {"answer": "a dog", "count": 3, "share": 0.3}
ODD_FILES = {
    "evaluations/step_00000006.json": ["{}", '{"zero_shot": {"a": {}}}', '{"zero_shot": 3}', "["],
    "metrics.jsonl": [
        '{"step": null, "loss": 1}',
        '{"step": 1, "loss": Infinity}',
        '{"step": "x"}',
    ],
    "plan.json": ['{"predicted": 3}', "[]"],
    "run.json": ['{"versions": []}', "3"],
}


@pytest.mark.parametrize(("name", "content"), [(n, c) for n, cs in ODD_FILES.items() for c in cs])
def test_odd_files_are_shown_as_far_as_they_go_or_named(
    name: str, content: str, tmp_path: Path
) -> None:
    folder, good = write_run(tmp_path / "run"), write_run(tmp_path / "good")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    try:
        write_report([good, folder], tmp_path / "x.html")
    except ValueError as error:
        assert str(folder) in str(error) and "\n" not in str(error)


def test_runs_of_the_same_name_are_called_by_their_paths(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / part / "run") for part in "ab"]
    text = write_report(folders, tmp_path / "out" / "report.html").read_text()
    assert all(str(folder) in text for folder in folders)


def test_text_from_a_run_is_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<script>alert(1)<")
    assert "<script>alert" not in write_report([folder], tmp_path / "report.html").read_text()


def test_numbers_that_are_not_finite_leave_a_gap() -> None:
    line = Series("x", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)], 0)
    svg = Chart("x", [line]).svg
    path = re.search(r'<path class="s0" d="(.*?)"', svg)
    assert path is not None
    assert (path.group(1).count("M"), path.group(1).count("L")) == (2, 1)
    assert Chart("x", [Series("x", [(1, None)], 0)]).svg == ""


def test_long_curves_keep_their_extremes() -> None:
    points = [(float(n), math.sin(n)) for n in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    thinned = thin(points)
    assert len(thinned) <= 410
    assert (54_321.0, 9.0) in thinned
    assert thinned == sorted(thinned)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0), (5, 5), (-3e-9, 2e-9), (0.1, 123456.0), (-7, -6.5)]
)
def test_ticks_enclose_the_values(low: float, high: float) -> None:
    found = ticks(low, high, 4)
    assert found[0] <= low + 1e-12
    assert found[-1] >= high - 1e-12
    assert 2 <= len(found) <= 8


def test_short_numbers() -> None:
    numbers = [0, 0.00025, 14.3, 9999, 12345, 2_500_000, 3e9, 1e-12]
    shown = ["0", "0.00025", "14.3", "9999", "12.35k", "2.5M", "3G", "1e-12"]
    assert [short(number) for number in numbers] == shown


def test_overview_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    rows = {
        row.label: row.cells[0].text for row in overview([read_run(write_run(tmp_path / "r"))]).rows
    }
    assert rows["Loss"] == "fastclip v3"
    assert rows["Last loss (chance)"] == "0.7000 (4.159)"
    assert rows["Training data"] == "a.tar b.tar"
    assert "Ranks" not in rows
    assert flatten({"a": {"b": 1}, "c": 2}) == {"a.b": 1, "c": 2}
