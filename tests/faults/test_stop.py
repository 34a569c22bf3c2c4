"""Asked to stop: any rank, any of the signals, a file; once, everywhere, and nothing is lost."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import psutil
import pytest
import torch
from processes import Run, configuration, last_step, losses, start
from safetensors.torch import load_file

from disco_ds.checkpoint import CheckpointConfig, find_checkpoint
from disco_ds.config import TrainConfig

STEPS = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = configuration(
        tmp_path_factory.mktemp("whole"),
        "ddp",
        steps=STEPS,
        checkpoint=CheckpointConfig(every_steps=100),
    )
    assert start(config, 2).wait() == [0, 0]
    return config


def _another(whole: TrainConfig, folder: Path, **changes: object) -> TrainConfig:
    return dataclasses.replace(whole, run_dir=str(folder / "run"), **changes)  # type: ignore[arg-type]


def _stopped_and_saved(run: Run, config: TrainConfig) -> int:
    statuses = run.wait()
    assert statuses == [75, 75], run.text()
    assert run.text().count("asked to stop by") == 1, run.text()
    folder = find_checkpoint(Path(config.run_dir or ""), "latest")
    assert folder is not None
    saved = int(folder.name.removeprefix("step_"))
    assert saved == last_step(config)
    return saved


def _continues_as_if_nothing_had_happened(config: TrainConfig, whole: TrainConfig) -> None:
    run = start(config, 2, resume="latest")
    assert run.wait() == [0, 0], run.text()
    assert losses(config) == losses(whole)
    found, expected = (
        load_file(Path(c.run_dir or "") / "checkpoints" / f"step_{STEPS:08d}" / "model.safetensors")
        for c in (config, whole)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGUSR1, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, 1, marks=pytest.mark.slow),
    ],
    ids=["TERM", "USR1", "USR2"],
)
def test_a_signal_to_one_rank_stops_all(
    whole: TrainConfig, tmp_path: Path, number: int, rank: int
) -> None:
    config = _another(whole, tmp_path)
    run = start(config, 2)
    assert run.until(lambda: last_step(config) >= 2)
    run.signal(rank, number)
    run.signal(rank, signal.SIGTERM)  # a second one does no harm
    saved = _stopped_and_saved(run, config)
    assert 2 <= saved < STEPS
    _continues_as_if_nothing_had_happened(config, whole)


def test_signals_to_every_process_of_the_job(whole: TrainConfig, tmp_path: Path) -> None:
    """As a scheduler does it: data workers get them too, and neither save, die nor linger."""
    config = _another(whole, tmp_path)
    run = start(config, 2)
    assert run.until(lambda: last_step(config) >= 2)
    children = [
        child
        for process in run.processes
        for child in psutil.Process(process.pid).children(recursive=True)
    ]
    assert len(children) >= 2
    for _ in range(2):
        for process in (*children, *(psutil.Process(p.pid) for p in run.processes)):
            for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT):
                process.send_signal(number)
    _stopped_and_saved(run, config)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    _continues_as_if_nothing_had_happened(config, whole)


@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "spawn"])
def test_workers_end_with_a_killed_trainer(whole: TrainConfig, tmp_path: Path, method: str) -> None:
    data = dataclasses.replace(whole.data, start_method=method)  # type: ignore[arg-type]
    config = _another(whole, tmp_path, data=data, steps=1000)
    run = start(config, 1)
    assert run.until(lambda: last_step(config) >= 1)
    children = psutil.Process(run.processes[0].pid).children(recursive=True)
    assert children
    run.kill(0)
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


def test_a_signal_during_start_up(whole: TrainConfig, tmp_path: Path) -> None:
    config = _another(whole, tmp_path)
    run = start(config, 2)
    assert run.until(lambda: "run folder" in run.text())
    run.signal(1, signal.SIGUSR2)
    assert run.wait() == [75, 75], run.text()
    assert "nothing to save" in run.text() or find_checkpoint(Path(config.run_dir or ""), "latest")
    _continues_as_if_nothing_had_happened(config, whole)


def test_stop_file(whole: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, file = _another(whole, tmp_path), tmp_path / "stop"
    file_on_rank_0 = {"DISCO_STOP_FILE": str(file)}
    run = start(config, 2, environment=file_on_rank_0)
    assert run.until(lambda: last_step(config) >= 2)
    file.touch()
    _stopped_and_saved(run, config)
    assert f"stop file {file}" in run.text()
    file.unlink()
    _continues_as_if_nothing_had_happened(config, whole)


def test_stop_while_a_save_is_written_in_the_background(whole: TrainConfig, tmp_path: Path) -> None:
    config = _another(whole, tmp_path, checkpoint=CheckpointConfig(every_steps=2, background=True))
    run = start(config, 2, sabotage="slow_files")
    checkpoints = Path(config.run_dir or "") / "checkpoints"
    assert run.until(lambda: any(checkpoints.glob(".step_*")))
    run.signal(0, signal.SIGTERM)
    _stopped_and_saved(run, config)
    assert not list(checkpoints.glob(".*"))
    _continues_as_if_nothing_had_happened(config, whole)


def test_train_py_listens_before_its_imports(tmp_path: Path) -> None:
    """A signal in the first moments: remembered, not fatal."""
    import subprocess
    import sys
    import time

    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, root / "train.py", "--no_such_flag", "1"], stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        while not _catches(process.pid, signal.SIGUSR2):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(120) == 2
    finally:
        process.kill()
        process.wait()


def _catches(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(
        next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16
    )
    return bool(mask >> (number - 1) & 1)
