"""``submit`` and ``submit_array``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from disco_ds.config import TrainConfig, local_batch_size
from disco_ds.launch.array import select_members, submit_sweep
from disco_ds.launch.folder import RunFolder
from disco_ds.launch.job import Job
from disco_ds.launch.resources import Resources
from disco_ds.launch.submission import Member, new_folder, plan_member, submit_run
from disco_ds.launch.sweep import member_name

Run = TrainConfig | Sequence[str]
"""A configuration, or arguments of train.py."""


def submit(run: Run, resources: Resources) -> Job:
    """Submit one run; returns at once.

    ``run_dir`` of the configuration is its folder, or a new one below ``runs``. A folder whose run
    did not finish is continued.

    Raises:
        ValueError: wrong configuration, no Slurm here, or Slurm refused.
    """
    return Job(submit_run(_member(run, resources, None), resources))


def submit_array(
    runs: Sequence[Run],
    resources: Resources,
    folder: str | Path,
    *,
    retry_failed: bool = False,
) -> list[Job]:
    """Submit many runs as job arrays, each in its own folder below ``folder``; returns all of them.

    Runs that finished, failed or are active there are not started again, failed ones with
    ``retry_failed``.

    Raises:
        ValueError: wrong configuration, no Slurm here, or Slurm refused.
    """
    base = Path(folder).absolute()
    members = [_member(run, resources, base) for run in runs]
    chosen, _left_out = select_members(members, retry_failed=retry_failed)
    if chosen:
        submit_sweep(chosen, resources, base)
    return [Job(RunFolder(member.run_dir)) for member in members]


def _member(run: Run, resources: Resources, parent: Path | None) -> Member:
    if not isinstance(run, TrainConfig):
        return plan_member(run, resources, parent=parent)
    local_batch_size(run, resources.world_size)
    member = Member((), run, Path(), run.model.name)
    if parent is not None:
        folder = parent / member_name({}, member.signature)
    else:
        folder = Path(run.run_dir) if run.run_dir else new_folder(member.name)
    folder = folder.absolute()
    arguments = ("--config", str(folder / "launch" / "config.json"))
    return dataclasses.replace(member, run_dir=folder, arguments=arguments)
