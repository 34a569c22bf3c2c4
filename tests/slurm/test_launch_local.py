"""``--cluster local`` and ``debug`` for real: the same script, worker and stop protocol."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_cases import (
    LAUNCHER,
    ROOT,
    assert_same_weights,
    launch,
    logged_steps,
    logs,
    train_arguments,
    wait_for,
)
from shards import write_shards

from disco_ds.command_line import parse_command_line
from disco_ds.launch import Job, JobFailed, Resources, submit
from disco_ds.launch.cli import main
from disco_ds.launch.folder import RunFolder

pytestmark = pytest.mark.timeout(600)
STEPS = 40
NODES = ("--cluster", "local", "--nodes", "2", "--gpus_per_node", "0", "--ranks_per_node", "1")


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def whole(pattern: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that nobody disturbs, and what the command printed."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = train_arguments(pattern, steps=STEPS)
    said = launch("train", *NODES, "--", *arguments, "--run_dir", "run", cwd=folder)
    return folder / "run", said


def test_two_virtual_nodes(whole: tuple[Path, str]) -> None:
    run, said = whole
    assert f"step {STEPS}/{STEPS}" in said
    assert said.splitlines()[-1].startswith("done: ")
    assert logged_steps(run) == list(range(1, STEPS + 1))
    attempt = RunFolder(run).last_attempt()
    assert attempt is not None
    ranks = [json.loads((attempt / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(rank["node"], rank["NODE_RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [
        ("local0", "0", "0"),
        ("local1", "1", "0"),
    ]


def test_run_folder_has_code_revision_and_configuration(whole: tuple[Path, str]) -> None:
    launched = RunFolder(whole[0]).launch
    code = launched / "code"
    assert (code / "disco_ds" / "trainer.py").read_bytes() == (
        ROOT / "disco_ds" / "trainer.py"
    ).read_bytes()
    revision = json.loads((code / "revision.json").read_text())
    assert revision["git_revision"] is None or len(revision["git_revision"]) == 40
    assert revision["changed"] == (code / "changes.diff").exists()
    assert json.loads((launched / "config.json").read_text())["steps"] == STEPS


def test_stop_requeue_and_resume_equal_an_uninterrupted_run(
    whole: tuple[Path, str],
    pattern: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = train_arguments(pattern, steps=STEPS)
    command = ["train", *NODES, "--detach", "--", *arguments, "--run_dir", "run"]
    launch(*command, cwd=tmp_path)
    run = tmp_path / "run"
    wait_for(lambda: len(logged_steps(run)) >= 2, "step", folder=run)
    job = Job(RunFolder(run))
    first = job.job_id
    assert main(["stop", "--requeue", str(run)]) == 0
    assert "continues under the same job id" in capsys.readouterr().out
    job.wait(240)
    assert job.state == "done", logs(run)
    assert job.job_id == first
    assert [event.name for event in job.run.events()] == ["started", "requeued", "started", "done"]
    assert logged_steps(run) == list(range(1, STEPS + 1))
    assert_same_weights(whole[0], run)
    # The log goes on from one attempt to the next.
    said = launch("logs", "-f", "run", cwd=tmp_path)
    assert "resumed from" in said
    assert f"step {STEPS}/{STEPS}" in said


@pytest.mark.slow
def test_a_killed_rank_is_named_and_retry_finishes(pattern: str, tmp_path: Path) -> None:
    resources = Resources(cluster="local", nodes=2, gpus_per_node=0, ranks_per_node=1)
    arguments = [*train_arguments(pattern, steps=60), "--run_dir", str(tmp_path / "run")]
    job = submit(arguments, resources)
    run = tmp_path / "run"
    wait_for(lambda: len(logged_steps(run)) >= 2, "step", folder=run)
    attempt = job.run.last_attempt()
    assert attempt is not None
    os.kill(json.loads((attempt / "rank-1.json").read_text())["pid"], signal.SIGKILL)
    with pytest.raises(JobFailed, match="first to fail: rank 1 on node local1: Killed"):
        job.result(timeout=240)
    said = launch("status", "run", cwd=tmp_path)
    assert "failed" in said
    assert "rank 1 on local1: Killed" in said
    assert "submitted local-" in launch("retry", "run", cwd=tmp_path)
    wait_for(lambda: job.state == "running", "running", folder=run)
    assert "save and stop" in job.stop()
    assert job.wait(240).state == "stopped", logs(run)
    assert isinstance(job.exception(), JobFailed)


def test_sweep_runs_one_after_the_other(pattern: str, tmp_path: Path) -> None:
    sweep = ["array", "--cluster", "local", "--gpus_per_node", "0", "--set", "seed=1,2"]
    command = [*sweep, "--sweep_dir", "sweep", "--wait", "--"]
    arguments = train_arguments(pattern, steps=2)
    said = launch(*command, *arguments, cwd=tmp_path)
    assert "2 member(s)" in said
    runs = sorted((tmp_path / "sweep").glob("seed=*"))
    assert [json.loads((run / "config.json").read_text())["seed"] for run in runs] == [1, 2]
    ends = [RunFolder(run).events() for run in runs]
    assert ends[0][-1].time <= ends[1][0].time
    assert "0 to run, 2 done" in launch(*command, *arguments, cwd=tmp_path)


def test_debug_is_one_process_this_one(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (10, 12, 15)}
    arguments = train_arguments(pattern, steps=2)
    try:
        command = ["train", "--cluster", "debug", "--", *arguments, "--run_dir", "run"]
        assert main(command) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert logged_steps(tmp_path / "run") == [1, 2]
    assert Job(RunFolder(tmp_path / "run")).state == "done"


def test_a_configuration_is_submitted_from_python(pattern: str, tmp_path: Path) -> None:
    config, _ = parse_command_line(train_arguments(pattern, steps=2), {})
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    resources = Resources(cluster="local", gpus_per_node=0)
    job = submit(config, resources)
    assert job.job_id.startswith("local-")
    assert job.result(timeout=240)["step"] == 2
    assert "done: step 2" in (job.stdout() or "")
    with pytest.raises(ValueError, match="holds a run with another configuration"):
        submit(dataclasses.replace(config, seed=7), resources)


def test_a_script_that_fails_before_the_ranks_says_why(pattern: str, tmp_path: Path) -> None:
    setup = ("echo no such module: cuda", "exit 3")
    resources = Resources(cluster="local", gpus_per_node=0, setup=setup)
    arguments = [*train_arguments(pattern, steps=2), "--run_dir", str(tmp_path / "run")]
    job = submit(arguments, resources).wait(60)
    assert job.state == "lost"
    assert "no such module: cuda" in str(job.exception())


def test_ctrl_c_stops_gracefully(pattern: str, tmp_path: Path) -> None:
    arguments = train_arguments(pattern, steps=2000)
    process = subprocess.Popen(
        [
            *(sys.executable, str(LAUNCHER), "train", "--cluster", "local"),
            *("--gpus_per_node", "0", "--", *arguments, "--run_dir", "run"),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: len(logged_steps(tmp_path / "run")) >= 2, "step", folder=tmp_path)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "asked to save and stop" in said
    assert Job(RunFolder(tmp_path / "run")).state == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))
