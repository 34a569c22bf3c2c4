"""On a real Slurm with four nodes on this machine: what the launcher promises, end to end."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from launch_cases import (
    LAUNCHER,
    ROOT,
    assert_same_weights,
    logged_steps,
    logs,
    train_arguments,
    wait_for,
)
from shards import write_shards

from disco_ds.launch import Job, JobFailed, Resources, submit, submit_array
from disco_ds.launch.cli import main
from disco_ds.launch.folder import RunFolder

if TYPE_CHECKING:
    from conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
PATIENCE = 300
CPU = Resources(gpus_per_node=0, time="60")
TWO_NODES = Resources(gpus_per_node=0, nodes=2, time="60")


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "shards")


def arguments(pattern: str, run: str, *, steps: int) -> list[str]:
    return [*train_arguments(pattern, steps=steps), "--run_dir", run]


def rank_notes(job: Job) -> list[dict[str, Any]]:
    attempt = job.run.last_attempt()
    assert attempt is not None
    files = sorted(attempt.glob("rank-*.json"))
    return [json.loads(file.read_text()) for file in files]


def wait_for_steps(job: Job, count: int = 2) -> None:
    wait_for(lambda: len(logged_steps(job.run.path)) >= count, "step", folder=job.run.path)


def expect_done(job: Job, steps: int) -> None:
    assert job.wait(PATIENCE).state == "done", logs(job.run.path)
    assert logged_steps(job.run.path) == list(range(1, steps + 1))


def names(job: Job) -> list[str]:
    return [event.name for event in job.run.events()]


def test_one_job_submitted_from_inside_another(
    slurm: Cluster, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the outer job's size, binding or ranks reaches the inner one."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "29500")
    words = [sys.executable, str(LAUNCHER), "train", "--gpus_per_node", "0", "--"]
    command = " ".join(map(repr, [*words, *arguments(pattern, "run", steps=2)]))
    said = slurm.ask("sbatch", "-n3", "-c2", "-o", "outer.log", "--wait", "--wrap", command)
    outer = said.split()[-1]
    job = Job(RunFolder(Path("run").absolute()))
    assert Path("outer.log").read_text().startswith(f"submitted {job.job_id}")
    assert job.job_id != outer
    metrics = job.result(PATIENCE)
    assert metrics["step"] == 2
    assert "error" not in (job.stdout() or "error")
    shown = slurm.ask("scontrol", "-o", "show", "job", job.job_id)
    assert "NumTasks=1 CPUs/Task=1" in shown
    (note,) = rank_notes(job)
    assert (note["RANK"], note["WORLD_SIZE"], note["source"]) == ("0", "1", "one process")


def test_an_array_of_four_is_a_grid(
    slurm: Cluster, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["array", "--gpus_per_node", "0", "--max_parallel", "2", "--sweep_dir", "sweep"]
    command += ["--set", "optim.lr=1e-3,1e-4", "--set", "seed=0,1", "--wait", "--"]
    base = train_arguments(pattern, steps=2)
    assert main([*command, *base]) == 0, logs(Path("sweep"))
    runs = [path for path in sorted(Path("sweep").iterdir()) if path.name != "submissions"]
    found = [json.loads((run / "config.json").read_text()) for run in runs]
    assert sorted((c["optim"]["lr"], c["seed"]) for c in found) == [
        *((1e-4, 0), (1e-4, 1), (1e-3, 0), (1e-3, 1))
    ]
    jobs = sorted(str(RunFolder(run).job()) for run in runs)
    first = jobs[0].split("_")[0]
    assert jobs == [f"{first}_{index}" for index in range(4)]
    script = next(Path("sweep").glob("submissions/*/000/script.sh")).read_text()
    assert "#SBATCH --array=0-3%2\n" in script
    capsys.readouterr()
    assert main([*command, *base]) == 0
    assert "4 member(s)" in (said := capsys.readouterr().out)
    assert "0 to run, 4 done" in said
    assert "submitted" not in said


@pytest.mark.parametrize("slurm", ["silent_cluster"], indirect=True)
def test_an_array_beyond_max_array_size_is_chunked(slurm: Cluster, pattern: str) -> None:
    runs = [[*train_arguments(pattern, steps=1), "--seed", str(seed)] for seed in range(4)]
    resources = Resources(gpus_per_node=0, time="60", max_parallel=2)
    jobs = submit_array(runs, resources, "sweep")
    assert len({job.job_id.split("_")[0] for job in jobs}) == 2
    for job in jobs:
        expect_done(job, 1)


DEMO = ("--preset", "demo", "--model.name", "disco-demo-vit", "--global_batch_size", "32")


def test_zero2_on_two_nodes_stopped_and_requeued_equals_uninterrupted(
    slurm: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 x 2 ranks on the demo data; the same job id goes back into the queue."""
    resources = Resources(gpus_per_node=0, ranks_per_node=2, nodes=2, time="60")
    zero2 = ("--deepspeed_config", str(ROOT / "ds_configs" / "zero2.json"))
    few = (
        "--log_every_steps",
        "1",
        "--timeout_seconds",
        "120",
        "--evaluation.retrieval",
        "--evaluation.zero_shot",
    )
    steps = 12
    demo = [*DEMO, *zero2, *few, "--steps", str(steps), "--device", "cpu"]
    whole = submit([*demo, "--run_dir", "whole"], resources)
    expect_done(whole, steps)
    notes = rank_notes(whole)
    assert [(note["RANK"], note["LOCAL_RANK"], note["NODE_RANK"]) for note in notes] == [
        *(("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"))
    ]
    assert len({note["node"] for note in notes}) == 2

    stopped = submit([*demo, "--run_dir", "stopped"], resources)
    first = stopped.job_id
    wait_for_steps(stopped)
    assert main(["stop", "--requeue", "stopped"]) == 0
    assert "continues under the same job id" in capsys.readouterr().out
    expect_done(stopped, steps)
    assert stopped.job_id == first
    assert names(stopped) == ["started", "requeued", "started", "done"]
    assert_same_weights(whole.run.path, stopped.run.path)


@pytest.mark.parametrize(
    ("slurm", "heard"),
    [
        ("warning_cluster", "asked to stop by stop file"),
        ("silent_cluster", "asked to stop by SIGTERM"),
    ],
    indirect=["slurm"],
)
def test_preempted_by_a_higher_partition(slurm: Cluster, heard: str, pattern: str) -> None:
    """With the job's own signal to the batch shell, and with nothing but SIGTERM to the ranks."""
    steps = 60
    job = submit(arguments(pattern, "run", steps=steps), TWO_NODES)
    first = job.job_id
    wait_for_steps(job)
    other = ("-p", "high", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
    slurm.ask("sbatch", *other)
    expect_done(job, steps)
    assert job.job_id == first
    assert names(job) == ["started", "requeued", "started", "done"]
    assert job.run.counters() == {"preemptions": 1}
    said = (job.run.attempts()[0] / "rank-0.log").read_text()
    assert heard in said
    assert f"slurmstepd: {first}" not in said


def test_a_killed_rank_ends_the_job_and_is_named(
    slurm: Cluster, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(arguments(pattern, "run", steps=2000), TWO_NODES)
    wait_for_steps(job)
    note = rank_notes(job)[1]
    os.kill(note["pid"], signal.SIGKILL)
    with pytest.raises(JobFailed) as caught:
        job.result(PATIENCE)
    report = str(caught.value)
    assert f"first to fail: rank 1 on node {note['node']}: Killed" in report
    assert "last lines:" in report
    assert "hint: killed from outside" in report
    # The same in the job's own log, and in one line in the table.
    log = next(job.run.launch.glob("*_log.out")).read_text()
    assert f"first to fail: rank 1 on node {note['node']}: Killed" in log
    assert main(["status", "run"]) == 0
    said = capsys.readouterr().out
    assert f"rank 1 on {note['node']}: Killed" in said


@pytest.mark.skipif(os.getuid() != 0, reason="fake GPUs need root (mknod)")
def test_two_jobs_on_one_node_have_their_own_gpus_and_ports(
    slurm: Cluster, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where a port is in use and the user exports it."""
    with socket.socket() as stranger:
        stranger.bind(("", 0))
        stranger.listen()
        monkeypatch.setenv("MASTER_PORT", str(stranger.getsockname()[1]))
        resources = Resources(gpus_per_node=2, time="60", sbatch={"nodelist": "n1"})
        jobs = [submit(arguments(pattern, f"run{n}", steps=12), resources) for n in range(2)]
        for job in jobs:
            expect_done(job, 12)
    started = [job.run.events()[0].time for job in jobs]
    ended = [job.run.events()[-1].time for job in jobs]
    assert max(started) < min(ended), "they did not run side by side"
    bound = [[note["CUDA_VISIBLE_DEVICES"] for note in rank_notes(job)] for job in jobs]
    assert sorted(map(tuple, bound)) == [("0,1", "0,1"), ("2,3", "2,3")]
    assert [note["node"] for job in jobs for note in rank_notes(job)] == ["n1"] * 4
    ports = {
        json.loads((job.run.attempts()[0] / "rendezvous.json").read_text())["port"] for job in jobs
    }
    assert len(ports) == 2


def test_status_without_accounting(
    slurm: Cluster, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pending, running, and a job whose batch shell could not say its end."""
    assert "accounting_storage/none" in slurm.ask("scontrol", "show", "config")
    job = submit(arguments(pattern, "runs/killed", steps=2000), CPU)
    waiting = Resources(gpus_per_node=0, time="60", sbatch={"begin": "now+1hour"})
    later = submit(arguments(pattern, "runs/later", steps=2), waiting)
    wait_for(lambda: job.run.last_event(), "start", folder=job.run.path)
    assert main(["status", "runs"]) == 0
    said = capsys.readouterr().out
    states = {line.split()[0]: line.split()[1] for line in said.splitlines() if "runs/" in line}
    assert states == {"runs/killed": "running", "runs/later": "pending"}
    slurm.ask("scancel", "--batch", "--signal=KILL", job.job_id)
    assert job.wait(PATIENCE).state == "failed"
    assert main(["cancel", "runs/later"]) == 0
    assert later.state == "cancelled"
    capsys.readouterr()
    assert main(["status", "runs"]) == 0
    said = capsys.readouterr().out
    assert "Slurm: FAILED" in said
    assert [event.name for event in later.run.events()] == ["cancelled"]


def test_check_asks_slurm(slurm: Cluster, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = arguments(pattern, "run", steps=2)
    assert main(["train", "--gpus_per_node", "0", "--nodes", "2", "--check", "--", *base]) == 0
    assert "to start at" in capsys.readouterr().out
    for command, reason in (
        (["--check", "--partition", "gold"], "invalid partition"),
        (["--partition", "gold"], "invalid partition"),
        (["--check", "--nodes", "8"], "node"),
    ):
        assert main(["train", "--gpus_per_node", "0", *command, "--", *base]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: sbatch refuse")
        assert reason in error
        assert error.count("\n") == 1
    # A refused run leaves no trace, and the same command works once it is right.
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_time_limit(slurm: Cluster, pattern: str) -> None:
    """Slurm's own warning, at most a minute early, counts as a time-out."""
    resources = Resources(gpus_per_node=0, time="2", signal_lead_seconds=40)
    job = submit(arguments(pattern, "run", steps=100_000), resources)
    wait_for(lambda: "requeued" in names(job), "re-queue", folder=job.run.path)
    assert job.run.counters() == {"timeouts": 1}
    job.cancel()


@pytest.mark.slow
def test_lost_node(slurm: Cluster, pattern: str) -> None:
    """Slurm re-queues by itself; the run goes on from its newest checkpoint."""
    steps = 400
    base = [*arguments(pattern, "run", steps=steps), "--checkpoint.every_steps", "5"]
    job = submit(base, TWO_NODES)
    wait_for_steps(job, 8)
    node = rank_notes(job)[1]["node"]
    slurm.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    # The node comes back by itself when its slurmd registers again.
    wait_for(lambda: names(job).count("started") == 2, "re-queue", folder=job.run.path)
    expect_done(job, steps)
    assert job.run.counters() == {"preemptions": 1}
    assert "resumed from" in (job.stdout() or "")


@pytest.mark.slow
def test_plain_srun_needs_no_launcher(slurm: Cluster, pattern: str) -> None:
    """Ranks, address and port from the step's variables alone."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments(pattern, "run", steps=3)]
    slurm.ask("srun", "-N2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *command)
    assert logged_steps(Path("run")) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("requeue", [True, False])
def test_torchrun_on_each_node(slurm: Cluster, pattern: str, requeue: bool) -> None:
    """The other runner hears the same warning; where re-queueing is forbidden a new job goes on."""
    steps = 100
    resources = Resources(
        gpus_per_node=0, ranks_per_node=2, nodes=2, time="60", runner="torchrun", requeue=requeue
    )
    job = submit(arguments(pattern, "run", steps=steps), resources)
    first = job.job_id
    wait_for_steps(job)
    slurm.ask("scancel", "--batch", "--signal=USR2", first)
    expect_done(job, steps)
    assert (job.job_id == first) == requeue
    assert [note["RANK"] for note in rank_notes(job)] == ["0", "1", "2", "3"]
    assert [note["NODE_RANK"] for note in rank_notes(job)] == ["0", "0", "1", "1"]
