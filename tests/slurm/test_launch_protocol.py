"""The job script itself, with stand-ins for srun, scontrol and sbatch: who is counted as what."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from launch_cases import wait_for

from disco_ds.launch.executor import render_job
from disco_ds.launch.folder import RunFolder
from disco_ds.launch.resources import Limits, Resources
from disco_ds.launch.script import Placement

# Ranks that finish, save when asked (twice as long as a step), or end with a status.
SRUN = """#!/bin/bash
echo "srun $*" >> "$CALLS"
echo "$DISCO_STOP_FILE $DISCO_RENDEZVOUS $DISCO_ATTEMPT" > "$DISCO_ATTEMPT/seen"
case $(cat "$PLAN") in
  finish) exit 0 ;;
  status*) exit $(cut -d' ' -f2 "$PLAN") ;;
  saved) touch "$DISCO_ATTEMPT/saved"; exit 137 ;;
  terminated) exit 75 ;;
esac
for _ in $(seq 600); do [ -e "$DISCO_STOP_FILE" ] && { sleep 0.2; exit 75; }; sleep 0.05; done
exit 9
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$CALLS"
case $1 in
  requeue) [ -z "${REFUSE:-}" ] || { echo "Requested operation not permitted"; exit 1; }
           kill -TERM $PPID; exit 0 ;;
  *) echo "JobState=${JOB_STATE:-RUNNING}" ;;
esac
"""
SBATCH = """#!/bin/bash
echo "sbatch $*" >> "$CALLS"; env | grep -E '^(SLURM|RANK)' >> "$CALLS"
[ -z "${NO_SBATCH:-}" ] || exit 1
echo 4711
"""


@dataclass
class Scene:
    """A run folder, a script, and a Slurm that only writes down what it is asked."""

    folder: Path
    resources: Resources = field(default_factory=lambda: Resources(time="60"))
    environment: dict[str, str] = field(default_factory=dict)
    restart: int = 0

    def __post_init__(self) -> None:
        tools = self.folder / "bin"
        tools.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sbatch", SBATCH)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.run.launch.mkdir(parents=True)

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "run")

    def start(self, plan: str = "wait") -> subprocess.Popen[str]:
        (self.folder / "plan").write_text(plan)
        script = self.run.launch / "script.sh"
        placement = Placement(script, self.folder / "code", self.folder, (self.run.path,))
        script.write_text(render_job(self.resources, placement, name="test"))
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "PLAN": str(self.folder / "plan"),
            "SLURM_JOB_ID": "12",
            "SLURM_NTASKS": "99",
            "SLURM_RESTART_COUNT": str(self.restart),
            "RANK": "5",
            **self.environment,
        }
        return subprocess.Popen(
            ["bash", str(script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def warn(self, process: subprocess.Popen[str], number: int = signal.SIGUSR2) -> None:
        wait_for(lambda: list(self.run.launch.glob("attempts/*/seen")), "srun")
        process.send_signal(number)

    def events(self) -> list[tuple[str, str, str]]:
        return [(event.name, event.status, event.reason) for event in self.run.events()[1:]]

    def calls(self) -> str:
        return (self.folder / "calls").read_text()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    yield Scene(tmp_path)


def end(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=60)
    return said


def test_a_run_that_finishes(scene: Scene) -> None:
    process = scene.start("finish")
    end(process)
    assert process.returncode == 0
    assert scene.events() == [("done", "0", "")]
    assert "--kill-on-bad-exit=1" in scene.calls()
    seen = next(scene.run.launch.glob("attempts/*/seen")).read_text().split()
    assert [Path(word).name for word in seen[:2]] == ["stop", "rendezvous.json"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP])
def test_a_warning_becomes_a_stop_file_and_the_same_job_is_requeued(
    scene: Scene, number: int
) -> None:
    process = scene.start()
    scene.warn(process, number)
    end(process)
    assert scene.events() == [("requeued", "75", "preemptions")]
    assert "scontrol requeue 12\n" in scene.calls()
    assert scene.run.counters() == {"preemptions": 1}


def test_a_member_of_an_array_is_requeued_alone(scene: Scene) -> None:
    scene.environment = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    process = scene.start()
    scene.warn(process)
    end(process)
    assert "scontrol requeue 12_3\n" in scene.calls()
    assert scene.run.job() == "12_3"


def test_more_warnings_do_no_harm(scene: Scene) -> None:
    process = scene.start()
    for _ in range(3):
        scene.warn(process)
    end(process)
    assert scene.events() == [("requeued", "75", "preemptions")]


def test_ranks_that_got_only_sigterm(scene: Scene) -> None:
    """Without preempt_send_user_signal the shell hears nothing; the status says it."""
    end(scene.start("terminated"))
    assert scene.events() == [("requeued", "75", "preemptions")]


def test_a_rank_killed_while_leaving_does_not_hide_that_all_saved(scene: Scene) -> None:
    end(scene.start("saved"))
    assert scene.events() == [("requeued", "75", "preemptions")]


def test_near_the_time_limit_it_counts_as_a_timeout(scene: Scene) -> None:
    scene.resources = Resources(time="3", signal_lead_seconds=120)
    process = scene.start()
    scene.warn(process)
    end(process)
    assert scene.events() == [("requeued", "75", "timeouts")]


@pytest.mark.parametrize(
    ("limits", "time", "plan", "cause", "status"),
    [
        (Limits(preemptions=0), "60", "terminated", "preemptions", 75),
        (Limits(timeouts=0), "3", "terminated", "timeouts", 75),
        (Limits(failures=1), "60", "status 1", "failures", 1),
    ],
)
def test_each_cause_has_its_own_limit(
    scene: Scene, limits: Limits, time: str, plan: str, cause: str, status: int
) -> None:
    scene.resources = Resources(time=time, limits=limits)
    allowed = getattr(limits, cause)
    for _ in range(allowed):
        end(scene.start(plan))
        assert scene.events()[-1] == ("requeued", str(status), cause)
    process = scene.start(plan)
    end(process)
    assert process.returncode == status
    assert scene.events()[-1] == (
        "failed",
        str(status),
        f"{cause}: {allowed + 1}, the limit is {allowed}",
    )


@pytest.mark.parametrize(("status", "failures"), [(1, 0), (2, 5)])
def test_failures_end_the_run(scene: Scene, status: int, failures: int) -> None:
    """Not retried by default; wrong input never."""
    scene.resources = Resources(time="60", limits=Limits(failures=failures))
    process = scene.start(f"status {status}")
    end(process)
    assert process.returncode == status
    assert scene.events() == [("failed", str(status), f"exit status {status}")]
    assert "scontrol requeue" not in scene.calls()


def test_slurm_requeued_it_by_itself(scene: Scene) -> None:
    """A lost node: the attempt before never said its end."""
    end(scene.start("finish"))
    events = scene.run.launch / "events.tsv"
    events.write_text("\n".join(events.read_text().splitlines()[:-1]) + "\n")
    scene.restart = 1
    end(scene.start("finish"))
    assert scene.run.counters() == {"preemptions": 1}
    assert [event.name for event in scene.run.events()] == ["started", "started", "done"]


@pytest.mark.parametrize("refused", [True, False])
def test_where_requeueing_is_forbidden_a_follow_up_job_continues(
    scene: Scene, refused: bool
) -> None:
    if refused:
        scene.environment = {"REFUSE": "1"}
    else:
        scene.resources = replace(scene.resources, requeue=False)
    end(scene.start("terminated"))
    assert scene.events()[-1] == ("follow_up", "75", "4711")
    assert scene.run.job() == "4711"
    script = scene.run.script
    assert f"sbatch --parsable --dependency=afterany:12 {script}\n" in scene.calls()
    # Nothing of this job is inherited by the next.
    assert "SLURM_NTASKS" not in scene.calls()
    assert "RANK" not in scene.calls()


def test_follow_up_of_an_array_member(scene: Scene) -> None:
    scene.environment = {"REFUSE": "1", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    end(scene.start("terminated"))
    assert "--dependency=afterany:12_3 --array=3 " in scene.calls()
    assert scene.run.job() == "4711_3"


def test_no_way_to_continue_by_itself(scene: Scene) -> None:
    scene.environment = {"REFUSE": "1", "NO_SBATCH": "1"}
    process = scene.start("terminated")
    assert "sbatch" in end(process)
    assert process.returncode == 75
    assert scene.events()[-1][0] == "stopped"


def test_stop_stays_stopped_and_requeue_continues(scene: Scene) -> None:
    for request, expected in (("end", "stopped"), ("requeue", "requeued")):
        process = scene.start()
        wait_for(lambda: scene.run.request(request), "attempt")  # noqa: B023
        end(process)
        assert scene.events()[-1][0] == expected
    assert scene.run.counters() == {"requests": 1}


def test_a_cancelled_job_is_not_requeued(scene: Scene) -> None:
    """scancel sends SIGTERM to the ranks, which save as for a preemption."""
    scene.environment = {"JOB_STATE": "CANCELLED"}
    end(scene.start("terminated"))
    assert scene.events()[-1][0] == "stopped"
    assert "scontrol requeue" not in scene.calls()
