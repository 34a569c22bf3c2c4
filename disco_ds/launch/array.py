"""Many runs: the members of a sweep, which of them to run, and their job arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from disco_ds.launch import sweep as sweeps
from disco_ds.launch.executor import job_script_path, max_array_size, require_slurm
from disco_ds.launch.folder import RunFolder
from disco_ds.launch.preflight import check_settings
from disco_ds.launch.resources import Resources
from disco_ds.launch.script import Placement
from disco_ds.launch.snapshot import take_snapshot
from disco_ds.launch.state import look_up
from disco_ds.launch.submission import (
    Member,
    forgotten_when_refused,
    plan_member,
    start,
    write_spec,
)


def plan_sweep(
    arguments: Sequence[str], resources: Resources, sweep: sweeps.Sweep, folder: Path
) -> list[Member]:
    """All members of a sweep, checked.

    Raises:
        ValueError: naming the member and the flag; two members that mean the same run.
    """
    members = []
    seen: dict[str, sweeps.Overrides] = {}
    for overrides in sweep.members():
        try:
            member = plan_member(arguments, resources, overrides=overrides, parent=folder)
        except ValueError as error:
            raise ValueError(f"sweep member {describe(overrides)}: {error}") from error
        if (other := seen.get(member.signature)) is not None:
            raise ValueError(
                f"sweep members {describe(other)} and {describe(overrides)} are the same run"
            )
        seen[member.signature] = overrides
        members.append(member)
    return members


def describe(overrides: sweeps.Overrides) -> str:
    """Overrides in words."""
    return " ".join(f"{key}={' '.join(value)}" for key, value in overrides.items()) or "(base)"


def select_members(
    members: Sequence[Member], *, retry_failed: bool
) -> tuple[list[Member], dict[str, int]]:
    """Members to run now, and how many are left out, by state."""
    submitted = [m for m in members if RunFolder(m.run_dir).spec_file.exists()]
    states = look_up([RunFolder(member.run_dir) for member in submitted])
    by_folder = dict(zip((m.run_dir for m in submitted), states, strict=True))
    chosen, left_out = [], dict[str, int]()
    for member in members:
        state = by_folder[member.run_dir].state if member.run_dir in by_folder else "new"
        if state == "new" or (retry_failed and state in ("failed", "stopped", "cancelled")):
            chosen.append(member)
        else:
            left_out[state] = left_out.get(state, 0) + 1
    return chosen, left_out


def submit_sweep(
    members: Sequence[Member],
    resources: Resources,
    folder: Path,
    *,
    on_submit: Callable[[str, Sequence[Member]], None] = lambda job, part: None,
) -> list[RunFolder]:
    """Submit members as job arrays of at most MaxArraySize, or run them here.

    A ``max_parallel`` is split between the arrays; where it is too small for that, each array
    waits for the one before.

    Raises:
        ValueError: no Slurm here, or Slurm refused; what was submitted before stays submitted.
    """
    is_slurm = resources.cluster == "slurm"
    if is_slurm:
        require_slurm()
    for member in members:
        check_settings(member.config, resources)
    limit = max_array_size() if is_slurm else len(members)
    stamp = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    base = folder.absolute() / "submissions" / stamp
    code = take_snapshot(base / "code")
    parts = list(sweeps.chunks(len(members), limit))
    shares = sweeps.share_parallel(resources.max_parallel, [len(part) for part in parts])
    is_chain = resources.max_parallel is not None and resources.max_parallel < len(parts)
    before = ""
    for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
        chosen = [members[index] for index in part]
        for member in chosen:
            run = write_spec(member, resources, code=code)
            run.reset_counters()
        placement = Placement(
            script=job_script_path(base / f"{number:03d}"),
            code=code,
            working_folder=Path.cwd(),
            runs=tuple(member.run_dir for member in chosen),
            is_array=True,
        )
        options = {"dependency": f"afterany:{before}"} if is_chain and before else {}
        own = dataclasses.replace(
            resources, max_parallel=share, sbatch={**resources.sbatch, **options}
        )
        with forgotten_when_refused([RunFolder(member.run_dir) for member in chosen]):
            before = start(own, placement, name=folder.name)
        on_submit(before, chosen)
    return [RunFolder(member.run_dir) for member in members]
