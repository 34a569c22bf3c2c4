"""Submitting: submitit's executor with our job script, and an environment without leftovers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm import slurm as submitit_slurm

from disco_ds.launch.resources import Resources
from disco_ds.launch.script import Placement, cpus_per_task, script_body

NO_SLURM = (
    "no Slurm here (sbatch is not on the PATH): use --cluster local to run the same on this "
    "machine, or tools/local_slurm.sh up for a real Slurm on it"
)
# Set by launchers and by Slurm for one job; wrong in every other.
LEFTOVERS = re.compile(
    r"(SLURM|SBATCH|SRUN|SALLOC|OMPI|PMIX?|TORCHELASTIC|DISCO|SUBMITIT)_.*"
    r"|(LOCAL_|GROUP_|NODE_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|CROSS_(RANK|SIZE)|MASTER_(ADDR|PORT)"
)
# A user's own defaults for sbatch, which go over the script's lines.
SITE = ("account", "partition", "qos", "constraint", "reservation")
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", *(f"SBATCH_{name.upper()}" for name in SITE))
BINDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "OMP_NUM_THREADS")


# Options of sbatch that the rest of the job script counts on, and what sets them.
OWNED = {
    "array": "a sweep (slurm.py array)",
    "nodes": "nodes",
    "N": "nodes",
    "ntasks": "nodes and ranks_per_node",
    "n": "nodes and ranks_per_node",
    "ntasks-per-node": "ranks_per_node",
    "gpus-per-node": "gpus_per_node",
    "cpus-per-task": "cpus_per_gpu",
    "c": "cpus_per_gpu",
    "mem": "mem_gb",
    "time": "time",
    "t": "time",
    "signal": "signal and signal_lead_seconds",
    "requeue": "requeue",
    "no-requeue": "requeue",
    "output": "run_dir (logs lie there)",
    "o": "run_dir (logs lie there)",
    "error": "run_dir (logs lie there)",
    "e": "run_dir (logs lie there)",
    "open-mode": "nothing; logs of attempts are kept apart",
    "job-name": "nothing; it is the run's name",
    "J": "nothing; it is the run's name",
    "wrap": "nothing; the job runs train.py",
}


class DiscoExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    """submitit's Slurm executor; header and submission are its own, the body is ours.

    Nothing is pickled: the script starts ranks by name, works by hand too, and finds its state in
    the run folder.
    """

    def __init__(self, resources: Resources, placement: Placement, *, name: str) -> None:
        require_slurm()
        folder = placement.script.parent
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder=folder)
        self.resources, self.placement = resources, placement
        self.update_parameters(**sbatch_parameters(resources, name))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render(self.resources, self.placement, dict(self.parameters))

    def submit_script(self) -> str:
        """Write the script and hand it to Slurm; returns the job id.

        Raises:
            ValueError: Slurm refused, in Slurm's own words.
        """
        try:
            # submitit repeats what sbatch says; the reason is in the error.
            with (
                clean_environment(also=overruled(self.resources)),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                job = self._submit_command("")
        except submitit.core.utils.FailedJobError as error:
            raise ValueError(f"sbatch refused: {refusal(str(error), self.resources)}") from error
        self.placement.script.write_text(self._make_submission_file_text("", ""))
        return str(job.job_id)


def sbatch_parameters(resources: Resources, name: str) -> dict[str, Any]:
    """What submitit calls the options of sbatch."""
    optional = {
        key: getattr(resources, key)
        for key in ("partition", "account", "qos", "constraint", "exclude")
    }
    optional["cpus_per_task"] = cpus_per_task(resources)
    optional["gpus_per_node"] = resources.gpus_per_node or None
    if resources.mem_gb is not None:
        mebibytes = max(1, round(resources.mem_gb * 1024))
        optional["mem"] = "0" if resources.mem_gb == 0 else f"{mebibytes}M"  # 0: all of the node
    own = {key.lstrip("-"): value for key, value in resources.sbatch.items()}
    for key in own:
        if key in OWNED:
            raise ValueError(f"sbatch: {key}: the launcher decides it; set {OWNED[key]}")
    more: dict[str, Any] = {
        # To the batch shell alone: ranks, data workers and compilers are not signalled.
        "signal": f"B:{resources.signal}@{resources.signal_lead_seconds}",
        "requeue" if resources.requeue else "no-requeue": True,
        **({"reservation": resources.reservation} if resources.reservation else {}),
        **{key: True if value in ("", "true") else value for key, value in own.items()},
    }
    return {
        **{key: value for key, value in optional.items() if value is not None},
        "job_name": name,
        "nodes": resources.nodes,
        "ntasks_per_node": 1 if resources.runner == "torchrun" else resources.local_world_size,
        "time": resources.time_minutes,
        "stderr_to_stdout": True,
        "additional_parameters": more,
    }


def render(resources: Resources, placement: Placement, parameters: dict[str, Any]) -> str:
    """The whole job script."""
    if placement.is_array:
        count = len(placement.runs)
        parallel = resources.max_parallel or count
        parameters = {**parameters, "map_count": count, "array_parallelism": parallel}
    parameters = {**parameters, "wckey": None}
    header = submitit_slurm._make_sbatch_string(
        command="", folder=placement.script.parent, use_srun=False, **parameters
    )
    options = [line for line in header.splitlines() if line.startswith("#SBATCH")]
    return "\n".join(["#!/bin/bash", *options, "", script_body(resources, placement)])


def render_job(resources: Resources, placement: Placement, *, name: str) -> str:
    """The script of a submission, without submitting and without Slurm."""
    if resources.cluster == "local":
        return "\n".join(["#!/bin/bash", script_body(resources, placement)])
    return render(resources, placement, sbatch_parameters(resources, name))


def require_slurm() -> None:
    """Raises:
    ValueError: no Slurm on this machine, naming --cluster local.
    """
    if shutil.which("sbatch") is None:
        raise ValueError(NO_SLURM)


def leftovers(environ: Mapping[str, str]) -> list[str]:
    """Variables of an outer job or launcher, which a new job must not inherit."""
    inside = any(name in environ for name in ("SLURM_JOB_ID", "RANK", "DISCO_ATTEMPT"))
    return [
        name
        for name in environ
        if name not in KEPT
        and (LEFTOVERS.fullmatch(name) or (inside and name in BINDING))
        and not name.startswith("DISCO_REQUIRE")
    ]


def overruled(resources: Resources) -> list[str]:
    """The user's defaults for sbatch that profile or flags replace."""
    return [f"SBATCH_{name.upper()}" for name in SITE if getattr(resources, name) is not None]


@contextmanager
def clean_environment(*, keep_binding: bool = False, also: Iterable[str] = ()) -> Iterator[None]:
    """Hide :func:`leftovers`, and ``also``, from the programs that are started inside.

    With ``keep_binding`` they still use the GPUs and cores of this process, and no others.
    """
    names = [n for n in leftovers(os.environ) if not (keep_binding and n in BINDING)]
    names += [name for name in also if name in os.environ]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


def check_with_slurm(script: str, resources: Resources) -> str:
    """What ``sbatch --test-only`` says: an estimated start.

    Raises:
        ValueError: Slurm would refuse, in its own words.
    """
    require_slurm()
    with clean_environment(also=overruled(resources)):
        done = subprocess.run(
            ["sbatch", "--test-only"], input=script, capture_output=True, text=True, timeout=120
        )
    said = done.stdout + done.stderr
    if done.returncode:
        raise ValueError(f"sbatch refuses: {refusal(said, resources)}")
    return " ".join(said.split())


NO_CLUSTER = ("lookup failed", "fetch config", "Unable to contact", "Unable to establish")


def refusal(text: str, resources: Resources) -> str:
    """Slurm's reason in one line, with what to do about it."""
    said = re.findall(r"sbatch: error: (.*)", text)
    reason = " ".join("; ".join(dict.fromkeys(said or [text])).split())
    if "node configuration" in reason or "gres" in reason.lower():
        reason += (
            f" (asked for {resources.gpus_per_node} GPUs per node; --gpus_per_node 0 "
            "--ranks_per_node N for CPU nodes)"
        )
    if any(sign in reason for sign in NO_CLUSTER):
        reason += " (this machine reaches no Slurm cluster; --cluster local runs without one)"
    return reason


def max_array_size() -> int:
    """Slurm's MaxArraySize: array indices must stay below it.

    Raises:
        ValueError: Slurm does not answer.
    """
    done = subprocess.run(
        ["scontrol", "show", "config"], capture_output=True, text=True, timeout=60
    )
    match = re.search(r"MaxArraySize\s*=\s*(\d+)", done.stdout)
    if match is None:
        raise ValueError(f"scontrol show config: {' '.join(done.stderr.split()) or 'no answer'}")
    return int(match[1])


def job_script_path(folder: Path) -> Path:
    """Where a submission keeps its script."""
    return folder / "script.sh"
