from __future__ import annotations

import json
from pathlib import Path

from disco_ds.distributed import World
from disco_ds.metrics import METRICS_FILE, MetricsLog, read_metrics


def write(run_dir: Path, steps: range, *, first_step: int, world: World | None = None) -> None:
    log = MetricsLog(run_dir, world or World(), first_step=first_step)
    for step in steps:
        log.write(step, {"loss": step / 2})
    log.close()


def test_resumed_log_reads_like_one_run(tmp_path: Path) -> None:
    """Logged to 7, saved at 5, resumed: nothing lost, nothing twice, no smaller step."""
    write(tmp_path, range(1, 8), first_step=0)
    write(tmp_path, range(6, 11), first_step=5)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 11))


def test_half_written_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), first_step=0)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "lo')
    write(tmp_path, range(4, 6), first_step=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_tensorboard_has_the_same_axis(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 8), first_step=0)
    write(tmp_path, range(6, 11), first_step=5)
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 11))


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    write(tmp_path, range(3), first_step=0, world=World(rank=1, world_size=2))
    assert list(tmp_path.iterdir()) == []


def test_nan_is_valid_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, World(), first_step=0)
    log.write(1, {"loss": float("nan"), "other": float("inf")})
    log.close()
    text = (tmp_path / METRICS_FILE).read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0)["loss"] is None
