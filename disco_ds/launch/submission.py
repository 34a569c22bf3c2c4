"""From arguments of train.py to a submitted run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from disco_ds.checkpoint import find_checkpoint
from disco_ds.command_line import parse_command_line
from disco_ds.config import TrainConfig, from_plain, local_batch_size
from disco_ds.launch import sweep as sweeps
from disco_ds.launch.executor import (
    DiscoExecutor,
    clean_environment,
    job_script_path,
    render_job,
    require_slurm,
)
from disco_ds.launch.folder import Event, RunFolder, write_atomically
from disco_ds.launch.preflight import check_settings
from disco_ds.launch.resources import Resources
from disco_ds.launch.script import Placement
from disco_ds.launch.snapshot import take_snapshot
from disco_ds.launch.state import look_up
from disco_ds.preemption import EXIT_PREEMPTED
from disco_ds.presets import PRESETS


@dataclass(frozen=True)
class Member:
    """One run to submit."""

    arguments: tuple[str, ...]
    """Of train.py, without --run_dir and --resume."""
    config: TrainConfig
    """What they mean."""
    run_dir: Path
    name: str
    overrides: sweeps.Overrides = dataclasses.field(default_factory=dict)

    @property
    def plain(self) -> dict[str, Any]:
        """The resolved configuration as JSON values."""
        content: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.config)))
        return content

    @property
    def signature(self) -> str:
        """Equal for runs that do the same."""
        return sweeps.signature(self.plain)


def plan_member(
    arguments: Sequence[str],
    resources: Resources,
    *,
    overrides: sweeps.Overrides | None = None,
    parent: Path | None = None,
) -> Member:
    """Check the arguments of train.py as the ranks will, before anything is queued.

    Raises:
        ValueError: one line naming the flag, its value and the remedy.
    """
    overrides = overrides or {}
    own = [*sweeps.as_arguments(overrides), *sweeps.strip_arguments(arguments, overrides)]
    config, preset = parse_command_line(own, PRESETS)
    local_batch_size(config, resources.world_size)
    if config.resume not in (None, "latest"):
        _check_resume(config)
    kept = sweeps.strip_arguments(own, {"run_dir": (), "resume": ()})
    name = preset or config.model.name
    member = Member(tuple(kept), config, Path(), name, overrides)
    if parent is not None:
        folder = parent / sweeps.member_name(overrides, member.signature)
    elif config.run_dir is not None:
        folder = Path(config.run_dir)
    else:
        folder = new_folder(name)
    return dataclasses.replace(member, run_dir=folder.absolute())


def _check_resume(config: TrainConfig) -> None:
    try:
        find_checkpoint(Path(config.run_dir or "."), config.resume or "")
    except ValueError as error:
        raise ValueError(f"--resume {error}") from error


def new_folder(name: str) -> Path:
    """A folder below ``runs`` that does not exist yet."""
    first = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (first, *(first.with_name(f"{first.name}-{n}") for n in range(2, 1000)))
    return next(folder for folder in names if not folder.exists())


def check_new(member: Member) -> None:
    """Refuse a folder in which something else is.

    Raises:
        ValueError: a run is active there, or it holds files that no launcher wrote.
    """
    run = RunFolder(member.run_dir)
    if run.is_active() and is_alive(run):
        raise ValueError(
            f"--run_dir {run.path}: job {run.job()} is active there; cancel it, or choose another"
        )
    if run.spec_file.exists():
        old = run.spec()["signature"]
        if old != member.signature:
            raise ValueError(
                f"--run_dir {run.path}: holds a run with another configuration "
                f"({run.launch / 'config.json'}); choose another"
            )
    elif run.path.exists() and any(run.path.iterdir()) and member.config.resume is None:
        raise ValueError(
            f"--run_dir {run.path} exists: add --resume latest to continue it, or choose another"
        )


def is_alive(run: RunFolder) -> bool:
    """Whether the newest job of a run that has not ended still exists."""
    return look_up([run])[0].state in ("pending", "running", "requeued")


def write_spec(member: Member, resources: Resources, *, code: Path) -> RunFolder:
    """Create the launcher's part of a run folder.

    Raises:
        ValueError: it cannot be written.
    """
    run = RunFolder(member.run_dir)
    spec = {
        "name": member.name,
        "arguments": list(member.arguments),
        "overrides": {key: list(value) for key, value in member.overrides.items()},
        "resume": None if member.config.resume == "latest" else member.config.resume,
        "signature": member.signature,
        "resources": dataclasses.asdict(resources),
        "working_folder": str(Path.cwd()),
        "code": str(code),
        "total_steps": member.config.steps,
    }
    try:
        (run.launch / "attempts").mkdir(parents=True, exist_ok=True)
        write_atomically(run.launch / "config.json", json.dumps(member.plain, indent=2) + "\n")
        if not (run.path / "config.json").exists():
            # train.py writes its own when it starts.
            resolved = {**member.plain, "run_dir": str(run.path), "resume": None}
            write_atomically(run.path / "config.json", json.dumps(resolved, indent=2) + "\n")
        write_atomically(run.spec_file, json.dumps(spec, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"--run_dir {run.path}: cannot write there ({error.strerror})") from error
    return run


def submit_run(member: Member, resources: Resources, *, code: Path | None = None) -> RunFolder:
    """Submit one run; locally, start it in the background.

    Raises:
        ValueError: the folder is taken, no Slurm here, or Slurm refused.
    """
    if resources.cluster == "slurm":
        require_slurm()
    check_new(member)
    check_settings(member.config, resources)
    run = RunFolder(member.run_dir)
    if code is None:
        code = take_snapshot(run.launch / "code")
    write_spec(member, resources, code=code)
    placement = Placement(
        script=job_script_path(run.launch),
        code=code,
        working_folder=Path.cwd(),
        runs=(member.run_dir,),
    )
    with forgotten_when_refused([run]):
        start(resources, placement, name=member.name)
    return run


@contextmanager
def forgotten_when_refused(runs: Sequence[RunFolder]) -> Iterator[None]:
    """Leave no trace of runs that never came to be."""
    try:
        yield
    except ValueError:
        for run in runs:
            if not run.events() and run.waiting_job() is None:
                shutil.rmtree(run.launch)
                if [path.name for path in run.path.iterdir()] == ["config.json"]:
                    (run.path / "config.json").unlink()
                with contextlib.suppress(OSError):
                    run.path.rmdir()
        raise


def start(resources: Resources, placement: Placement, *, name: str) -> str:
    """Hand a placement to its cluster, and note it in each run; returns the job id."""
    if resources.cluster == "debug":
        return _run_in_this_process(placement)
    before = [len(RunFolder(path).events()) for path in placement.runs]
    if resources.cluster == "slurm":
        job = DiscoExecutor(resources, placement, name=name).submit_script()
    else:
        job = _start_here(resources, placement, name)
    is_slurm_array = placement.is_array and resources.cluster == "slurm"
    for index, path in enumerate(placement.runs):
        own = f"{job}_{index}" if is_slurm_array else job
        RunFolder(path).note_submission(own, before[index])
    return job


def _start_here(resources: Resources, placement: Placement, name: str) -> str:
    """One script for each run, and a process of its own that runs them."""
    scripts = []
    for path in placement.runs:
        script = job_script_path(path / "launch")
        own = dataclasses.replace(placement, script=script, runs=(path,), is_array=False)
        script.write_text(render_job(resources, own, name=name))
        scripts.append(str(script))
    command = ["bash", *scripts]
    if placement.is_array:
        loop = 'printf "%s\\0" "$@" | xargs -0 -n 1 -P "$0" setsid --wait bash'
        command = ["bash", "-c", loop, str(resources.max_parallel or 1), *scripts]
    placement.script.parent.mkdir(parents=True, exist_ok=True)
    log_file = placement.script.parent / "local.log"
    with clean_environment(keep_binding=True), log_file.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return f"local-{process.pid}"


def _run_in_this_process(placement: Placement) -> str:
    """One process, this one: for a debugger, and for tracebacks as they are."""
    from disco_ds.cli import train
    from disco_ds.launch.worker import run_arguments

    job = f"local-{os.getpid()}"
    for path in placement.runs:
        run = RunFolder(path)
        run.add_event(Event(time.time(), "started", job, "", "", socket.gethostname()))
        status = 1
        try:
            status = train(run_arguments(path))
        finally:
            ending = {0: "done", EXIT_PREEMPTED: "stopped"}.get(status, "failed")
            run.add_event(Event(time.time(), ending, job, str(status), "", f"status {status}"))
    return job


def retry_run(run: RunFolder) -> RunFolder:
    """Submit a run again, with its own resources and code, from its newest checkpoint.

    Raises:
        ValueError: it is active or finished, or Slurm refused.
    """
    state = look_up([run])[0].state
    if state in ("pending", "running", "requeued", "done"):
        raise ValueError(f"{run.path}: {state}, nothing to retry")
    spec = run.spec()
    resources = from_plain(Resources, json.loads(json.dumps(spec["resources"])))
    run.reset_counters()
    placement = Placement(
        script=job_script_path(run.launch),
        code=Path(spec["code"]),
        working_folder=Path(spec["working_folder"]),
        runs=(run.path.absolute(),),
    )
    start(resources, placement, name=spec["name"])
    return run
