"""The commands of ``launchers/slurm.py``, one dataclass each."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from disco_ds.launch import sweep as sweeps
from disco_ds.launch.array import describe, plan_sweep, select_members, submit_sweep
from disco_ds.launch.executor import check_with_slurm, job_script_path, render_job
from disco_ds.launch.folder import FINAL, RunFolder, find_runs
from disco_ds.launch.follow import follow, show
from disco_ds.launch.job import Job
from disco_ds.launch.preflight import check_settings
from disco_ds.launch.ranks_preview import rank_table
from disco_ds.launch.resources import Resources
from disco_ds.launch.script import Placement
from disco_ds.launch.state import look_up, table
from disco_ds.launch.submission import Member, plan_member, retry_run, submit_run

DONE, FAILED, INTERRUPTED = 0, 1, 130
Flat = Annotated[Resources, tyro.conf.arg(name="")]
Runs = tyro.conf.Positional[tuple[Path, ...]]


def say(text: str) -> None:
    """One or more lines for people, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class TrainCommand:
    """Submit one run. After `--` come the arguments of train.py."""

    resources: Flat = field(default_factory=Resources)
    profile: Path | None = None
    """Site profile, YAML; flags go over it."""

    dry_run: bool = False
    """Print the job script and the variables of each rank, submit nothing."""

    check: bool = False
    """Ask Slurm whether it would take the job (sbatch --test-only), submit nothing."""

    wait: bool = False
    """Show the log of rank 0 until the end, as --cluster local does; exit with the run's status."""

    detach: bool = False
    """--cluster local: return at once, the run goes on in the background."""

    def run(self, arguments: Sequence[str]) -> int:
        """Do it; returns the exit status."""
        member = plan_member(arguments, self.resources)
        if self.dry_run or self.check:
            return preview(self, [member], is_array=False, base=member.run_dir / "launch")
        run = submit_run(member, self.resources)
        job = Job(run)
        if self.resources.cluster == "debug":
            return DONE if job.state == "done" else exit_status(run)
        say(f"submitted {job.job_id}: {run.path}")
        if self.wait or (self.resources.cluster == "local" and not self.detach):
            return watch(job)
        return DONE


@dataclass(frozen=True)
class ArrayCommand:
    """Submit a sweep as a job array. After `--` come the arguments that all members share."""

    resources: Flat = field(default_factory=Resources)
    profile: Path | None = None
    """Site profile, YAML; flags go over it."""

    sweep: Path | None = None
    """Sweep file, YAML: grid, zip, list."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """SETTING=VALUE[,VALUE ...]: one more axis of the grid; may be repeated."""

    sweep_dir: Path | None = None
    """Folder of the sweep, with one run folder for each member; runs/NAME of the file when not
    given."""

    retry_failed: bool = False
    """Run members again that failed or were stopped or cancelled, from their newest checkpoint."""

    dry_run: bool = False
    """Print the members, the job script and the variables of each rank, submit nothing."""

    check: bool = False
    """Ask Slurm whether it would take the job (sbatch --test-only), submit nothing."""

    wait: bool = False
    """Wait until all members have ended; exit with 1 unless all are done."""

    def run(self, arguments: Sequence[str]) -> int:
        """Do it; returns the exit status."""
        sweep = sweeps.load_sweep(self.sweep) if self.sweep else sweeps.Sweep()
        sweep = sweep.with_grid(dict(sweeps.parse_set(text) for text in self.set))
        if self.sweep is None and not self.set:
            raise ValueError("array needs --sweep FILE or --set SETTING=VALUE,VALUE")
        if sweeps.strip_arguments(arguments, {"run_dir": ()}) != list(arguments):
            raise ValueError(
                "--run_dir: every member of an array has a folder of its own; --sweep_dir is "
                "where they lie"
            )
        folder = (self.sweep_dir or self._default_folder()).absolute()
        members = plan_sweep(arguments, self.resources, sweep, folder)
        chosen, left_out = select_members(members, retry_failed=self.retry_failed)
        say(_tally(members, chosen, left_out, folder))
        if self.dry_run or self.check:
            for member in chosen:
                say(f"{member.run_dir.name}: {describe(member.overrides)}")
            return preview(self, chosen, is_array=True, base=folder / "submissions")
        if chosen:
            submit_sweep(chosen, self.resources, folder, on_submit=_announce)
        return self._wait(members) if self.wait else DONE

    def _default_folder(self) -> Path:
        return Path("runs") / (self.sweep.stem if self.sweep else "sweep")

    def _wait(self, members: Sequence[Member]) -> int:
        runs = [RunFolder(member.run_dir) for member in members]
        while not all(state.is_final for state in look_up(runs)):
            time.sleep(2)
        states = look_up(runs)
        say(table(states))
        return DONE if all(state.state == "done" for state in states) else FAILED


def _announce(job: str, members: Sequence[Member]) -> None:
    say(f"submitted {job} with {len(members)} member(s)")


def _tally(
    members: Sequence[Member], chosen: Sequence[Member], left_out: dict[str, int], folder: Path
) -> str:
    parts = [f"{count} {state}" for state, count in sorted(left_out.items())]
    hint = " (--retry_failed runs failed ones again)" if "failed" in left_out else ""
    kept = f", {', '.join(parts)}{hint}" if parts else ""
    return f"{len(members)} member(s) in {folder}: {len(chosen)} to run{kept}"


def preview(
    command: TrainCommand | ArrayCommand, members: Sequence[Member], *, is_array: bool, base: Path
) -> int:
    """Print what would be submitted, or ask Slurm about it."""
    resources = command.resources
    if not members:
        return DONE
    if resources.cluster == "debug":
        say("--cluster debug: one process, here; no job script")
        return DONE
    placement = Placement(
        script=job_script_path(base),
        code=base / "code",
        working_folder=Path.cwd(),
        runs=tuple(member.run_dir for member in members),
        is_array=is_array and resources.cluster == "slurm",
    )
    script = render_job(resources, placement, name=members[0].name)
    if command.dry_run:
        say(script)
        say("# ---- train.py, in each rank ----")
        for member in members:
            start = member.config.resume or "latest"
            words = [*member.arguments, "--run_dir", str(member.run_dir), "--resume", start]
            say(f"# {shlex.join(words)}")
        say("# ---- variables of each rank ----")
        say(rank_table(resources))
    if command.check:
        if resources.cluster != "slurm":
            raise ValueError("--check asks Slurm; this is --cluster local")
        for member in members:
            check_settings(member.config, resources)
        say(check_with_slurm(script, resources))
    return DONE


@dataclass(frozen=True)
class StatusCommand:
    """Show runs: state, attempt, node, step, loss, samples/s, log."""

    runs: Runs = (Path("runs"),)
    """Run folders, or folders with runs in them."""

    def run(self, arguments: Sequence[str]) -> int:
        """Do it; returns the exit status."""
        say(table(look_up(find_runs(list(self.runs)))))
        return DONE


@dataclass(frozen=True)
class LogsCommand:
    """Print the output of a rank, of the newest attempt."""

    run_dir: tyro.conf.Positional[Path]
    """Run folder."""

    follow: Annotated[bool, tyro.conf.arg(aliases=["-f"])] = False
    """Go on until the run ends, through re-queues."""

    rank: int = 0
    """Which rank."""

    def run(self, arguments: Sequence[str]) -> int:
        """Do it; returns the exit status."""
        job = Job(_one_run(self.run_dir))
        if self.follow:
            follow(job, self.rank, sys.stdout)
        else:
            show(job, self.rank, sys.stdout)
        return DONE


@dataclass(frozen=True)
class StopCommand:
    """Ask runs to save and end, all ranks at the same step."""

    runs: Runs
    """Run folders, or folders with runs in them."""

    requeue: bool = False
    """Go back into the queue under the same job id and continue, instead of staying stopped."""

    def run(self, arguments: Sequence[str]) -> int:
        """Do it; returns the exit status."""
        for run in _given(self.runs):
            say(f"{run.path}: {Job(run).stop(requeue=self.requeue)}")
        return DONE


@dataclass(frozen=True)
class CancelCommand:
    """End runs now, without saving."""

    runs: Runs
    """Run folders, or folders with runs in them."""

    def run(self, arguments: Sequence[str]) -> int:
        """Do it; returns the exit status."""
        for run in _given(self.runs):
            say(f"{run.path}: {Job(run).cancel()}")
        return DONE


@dataclass(frozen=True)
class RetryCommand:
    """Submit runs again that failed, were stopped, cancelled or lost: from their newest checkpoint.

    A folder with runs in it means all such runs in it.
    """

    runs: Runs
    """Run folders, or folders with runs in them."""

    def run(self, arguments: Sequence[str]) -> int:
        """Do it; returns the exit status."""
        runs = _given(self.runs)
        for run, state in zip(runs, look_up(runs), strict=True):
            if state.state == "done" or not state.is_final:
                say(f"{run.path}: {state.state}, nothing to retry")
            else:
                say(f"{run.path}: submitted {Job(retry_run(run)).job_id}")
        return DONE


def _given(paths: Sequence[Path]) -> list[RunFolder]:
    runs = find_runs(list(paths))
    if not runs:
        raise ValueError(f"{', '.join(map(str, paths)) or 'no folder given'}: no submitted runs")
    return runs


def _one_run(path: Path) -> RunFolder:
    run = RunFolder(path)
    if not run.spec_file.exists():
        raise ValueError(f"{path}: not the folder of a submitted run (no launch/spec.json)")
    return run


def watch(job: Job) -> int:
    """Show a run until its end.

    On this machine the first Ctrl-C asks it to save and stop, the second ends it; a job of Slurm's
    goes on without its spectator.
    """
    interruptions = 0
    while True:
        try:
            follow(job, 0, sys.stdout, from_start=interruptions == 0)
            break
        except KeyboardInterrupt:
            if not job.job_id.startswith("local-"):
                say(f"job {job.job_id} goes on; logs -f, stop and cancel take {job.run.path}")
                return INTERRUPTED
            interruptions += 1
            say(job.stop() if interruptions == 1 else job.cancel())
    state = job.look_up()
    say(f"{state.state}: {job.run.path}" + (f" ({state.note})" if state.note else ""))
    if state.state in ("failed", "lost"):
        sys.stderr.write(f"{job.exception()}\n")
    return exit_status(job.run)


def exit_status(run: RunFolder) -> int:
    """The status with which a run ended; 1 when it could not say."""
    event = run.last_event()
    if event is None or event.name not in FINAL:
        return FAILED
    return int(event.status) if event.status else FAILED


Command = (
    Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[ArrayCommand, tyro.conf.subcommand("array")]
    | Annotated[StatusCommand, tyro.conf.subcommand("status")]
    | Annotated[LogsCommand, tyro.conf.subcommand("logs")]
    | Annotated[StopCommand, tyro.conf.subcommand("stop")]
    | Annotated[CancelCommand, tyro.conf.subcommand("cancel")]
    | Annotated[RetryCommand, tyro.conf.subcommand("retry")]
)
COMMANDS: dict[str, type] = {
    "train": TrainCommand,
    "array": ArrayCommand,
    "status": StatusCommand,
    "logs": LogsCommand,
    "stop": StopCommand,
    "cancel": CancelCommand,
    "retry": RetryCommand,
}


def with_resources(name: str, resources: Resources) -> TrainCommand | ArrayCommand:
    """The defaults of a submitting command."""
    command: type[TrainCommand] | type[ArrayCommand] = COMMANDS[name]
    return dataclasses.replace(command(), resources=resources)
