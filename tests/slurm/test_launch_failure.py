"""Failure reports and `status`, from what jobs leave behind and what Slurm answers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from disco_ds.launch.failure import explain
from disco_ds.launch.folder import Event, RunFolder, find_runs
from disco_ds.launch.job import Job
from disco_ds.launch.state import look_up, parse_sacct, table


def attempt(folder: Path, launcher: str, **ranks: tuple[float, int, str, str]) -> Path:
    """An attempt: srun's words, and (time, status, reason, log) of ranks r0, r1 ..."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launcher.log").write_text(launcher)
    for name, (when, status, reason, log) in ranks.items():
        rank = int(name[1:])
        note = {"rank": rank, "time": when, "node": f"n{rank}", "status": status}
        if status:
            (folder / f"failure-{rank}.json").write_text(json.dumps({**note, "reason": reason}))
        (folder / f"rank-{rank}.log").write_text(log)
    return folder


BAD_EXIT = "srun: launch/slurm: _step_signal: Terminating StepId=5.0\n"


def test_the_first_rank_in_time_is_named(tmp_path: Path) -> None:
    found = explain(
        attempt(
            tmp_path,
            f"srun: error: n2: task 2: Exited with exit code 1\n{BAD_EXIT}"
            "srun: error: n1: task 1: Exited with exit code 1\n",
            r1=(20.0, 1, "RuntimeError: later", "step 3\n"),
            r2=(10.0, 1, "KeyError: 'first'", "step 3\nTraceback\nKeyError: 'first'\n"),
        )
    )
    assert (found.rank, found.node, found.how) == (2, "n2", "KeyError: 'first'")
    assert found.last_lines[-1] == "KeyError: 'first'"
    assert "rank-2.log" in found.text()


def test_neighbours_of_a_killed_rank_are_not_the_cause(tmp_path: Path) -> None:
    """They note their error, the killed one cannot."""
    found = explain(
        attempt(
            tmp_path,
            f"srun: error: n3: task 3: Killed\n{BAD_EXIT}srun: error: n0: task 0: Terminated\n",
            r0=(5.0, 1, "RuntimeError: Connection closed by peer [127.0.0.1]:9", "step 7\n"),
            r3=(0.0, 0, "", ""),
        )
    )
    assert (found.rank, found.node, found.how) == (3, "n3", "Killed")
    assert "killed from outside" in (found.hint or "")
    # It printed nothing; where the run was is in the log of rank 0.
    assert found.last_lines == ("step 7",)


def test_a_neighbour_that_notices_first_is_not_the_cause(tmp_path: Path) -> None:
    found = explain(
        attempt(
            tmp_path,
            "",
            r0=(1.0, 1, "", "error: step 4: lost contact with another rank, which died\n"),
            r1=(2.0, 1, "torch.OutOfMemoryError: CUDA out of memory. Tried", "boom\n"),
        )
    )
    assert found.rank == 1
    assert "--micro_batch_size" in (found.hint or "")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "GPU out of memory"),
        ("slurmstepd: error: Detected 1 oom_kill event", "out of main memory"),
        ("OSError: [Errno 98] Address already in use", "a port is taken"),
        ("error: --resume x: no complete checkpoint there", "the checkpoint to resume from"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp", "NCCL_DEBUG"),
        ("OSError: [Errno 28] No space left on device", "a disk is full"),
    ],
)
def test_hints(line: str, hint: str, tmp_path: Path) -> None:
    found = explain(attempt(tmp_path, "", r0=(1.0, 1, "", f"start\n{line}\n")))
    assert hint in found.summary()
    assert f"hint: {found.hint}" in found.text()


def test_a_hint_is_about_the_cause_not_about_lines_beside_it(tmp_path: Path) -> None:
    lines = (
        "--resume latest: no checkpoint in run yet, starting fresh",
        "[W ProcessGroupNCCL.cpp] Warning: destroy_process_group() was not called",
        "Timeout while closing",
        "error: rank 0: [Errno 28] No space left on device",
    )
    found = explain(attempt(tmp_path, "", r0=(1.0, 1, "", "\n".join(lines) + "\n")))
    assert found.hint is not None and "a disk is full" in found.hint
    lines = (*lines[:2], "error: rank 0: 3 of 6 samples had to be skipped (bad_image 3)")
    found = explain(attempt(tmp_path / "b", "", r0=(1.0, 1, "", "\n".join(lines) + "\n")))
    assert found.hint is None


def test_ranks_that_never_started(tmp_path: Path) -> None:
    found = explain(attempt(tmp_path, "srun: error: Unable to create step: Bad image\n"))
    assert found.rank is None
    assert "Bad image" in found.summary()


# ---- status ------------------------------------------------------------------------------------


def submitted(folder: Path, job: str) -> RunFolder:
    run = RunFolder(folder)
    (run.launch / "attempts").mkdir(parents=True)
    run.spec_file.write_text("{}")
    run.note_submission(job, 0)
    return run


def started(run: RunFolder, job: str) -> RunFolder:
    name = f"20260101-000000-{job}-0"
    attempt(run.launch / "attempts" / name, "")
    run.add_event(Event(time.time(), "started", job, "", name, "n1"))
    return run


class FakeSlurm:
    """squeue, scontrol and sacct that answer from files; counts squeue calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "squeue").write_text(
            f"#!/bin/bash\necho called >> {folder}/asked\ncat {folder}/queue 2>/dev/null\n"
        )
        (folder / "scontrol").write_text(
            f'#!/bin/bash\ncat "{folder}/job.$4" 2>/dev/null || exit 1\n'
        )
        (folder / "sacct").write_text(
            '#!/bin/bash\necho "Slurm accounting storage is disabled" >&2; exit 1\n'
        )
        for name in ("squeue", "scontrol", "sacct"):
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def queue(self, *lines: str) -> None:
        (self.folder / "queue").write_text("\n".join(lines) + "\n")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def test_states_without_accounting(slurm: FakeSlurm, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    submitted(runs / "a", "10")
    started(submitted(runs / "b", "11"), "11")
    started(submitted(runs / "c", "12_0"), "12_0")
    started(submitted(runs / "d", "13"), "13")
    gone = started(submitted(runs / "e", "14"), "14")
    done = started(submitted(runs / "f", "15"), "15")
    done.add_event(Event(time.time(), "done", "15", "0"))
    (done.path / "metrics.jsonl").write_text(
        '{"step": 8, "loss": 1.25, "samples_per_second": 61.5}\n{"step": 8, "eval/x": 1}\n'
    )
    slurm.queue("10|PENDING|Priority", "11|RUNNING|None", "12_0|PENDING|BeginTime")
    (slurm.folder / "job.13").write_text("JobId=13 JobState=NODE_FAIL Reason=NodeDown\n")
    states = look_up(find_runs([runs]))
    found = {state.run.path.name: (state.state, state.note) for state in states}
    assert found["a"] == ("pending", "Priority")
    assert found["b"] == ("running", "")
    assert found["c"] == ("requeued", "BeginTime")
    assert found["d"][0] == "failed"
    assert found["d"][1].startswith("Slurm: NODE_FAIL, NodeDown; ")
    assert found["e"][0] == "lost"
    assert found["f"][0] == "done"
    # One question for all runs.
    assert (slurm.folder / "asked").read_text().count("called") == 1
    text = table(states)
    row = next(line for line in text.splitlines() if line.startswith(str(done.path)))
    assert row.split()[1:8] == ["done", "1", "15", "n1", "8", "1.2500", "61.5"]
    assert row.endswith("rank-0.log")
    # Nobody waits for a job that nobody knows.
    assert Job(gone).done()
    assert "lost" in str(Job(gone).exception())


def test_a_retried_run_is_pending_not_failed(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = started(submitted(tmp_path / "run", "10"), "10")
    run.add_event(Event(time.time(), "failed", "10", "1"))
    run.note_submission("20", len(run.events()))
    slurm.queue("20|PENDING|Resources")
    assert [(s.state, s.job) for s in look_up([run])] == [("pending", "20")]
    started(run, "20")
    slurm.queue("20|RUNNING|None")
    assert [(s.state, s.job, s.attempt) for s in look_up([run])] == [("running", "20", 2)]


def test_a_follow_up_job_is_the_one_to_ask_about(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = started(submitted(tmp_path / "run", "10"), "10")
    run.add_event(Event(time.time(), "follow_up", "10", "75", "", "33"))
    slurm.queue("33|PENDING|Dependency")
    assert [(s.state, s.job) for s in look_up([run])] == [("requeued", "33")]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["COMPLETED|None"], ("COMPLETED", "")),
        (["CANCELLED by 1000|None"], ("CANCELLED", "")),
        (["OUT_OF_MEMORY|None"], ("OUT_OF_MEMORY", "")),
        # Re-queued: the last line is the last run.
        (["PREEMPTED|None", "FAILED|NonZeroExitCode"], ("FAILED", "NonZeroExitCode")),
        ([""], None),
    ],
)
def test_recorded_words_of_sacct(lines: list[str], expected: tuple[str, str] | None) -> None:
    assert parse_sacct(lines) == expected
