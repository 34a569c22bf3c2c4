"""The job script: header, site settings, how ranks start, and the stop protocol. Pure text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disco_ds.launch.resources import Resources

PROTOCOL = Path(__file__).with_name("protocol.sh")
# Also after a success: rank 0 still writes the export when the others have left.
WAIT_SECONDS = 300

SLURM_PARTS = """\
JOB=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
RESTART=${SLURM_RESTART_COUNT:-0}
cancelled() {
  [ -e "$ATTEMPT/cancel" ] ||
    scontrol -o show job "$SLURM_JOB_ID" 2>/dev/null | grep -q JobState=CANCELLED
}
put_back() {
  trap - TERM INT HUP USR1 USR2
  if [ "$REQUEUE" = 1 ]; then
    if scontrol requeue "$JOB"; then sleep 600; exit "$1"; fi
    say "Slurm does not re-queue this job: a follow-up job continues it"
  fi
  # Variables of this job are not for the next one.
  for name in $(compgen -e | grep -E '^(SLURM|SBATCH|SRUN)_'); do
    [ "$name" = SLURM_CONF ] || unset "$name"
  done
  if NEXT=$(sbatch --parsable --dependency="afterany:${JOB%_*}${JOB_INDEX:+_$JOB_INDEX}" \\
      ${JOB_INDEX:+--array="$JOB_INDEX"} "$SCRIPT"); then
    event follow_up "$1" "${NEXT%%;*}${JOB_INDEX:+_$JOB_INDEX}"
  else
    finish stopped "$1" "saved, but this node may not submit: sbatch $SCRIPT continues it"
  fi
  exit "$1"
}
JOB_INDEX=${SLURM_ARRAY_TASK_ID:-}
"""

LOCAL_PARTS = """\
export DISCO_JOB=${DISCO_JOB:-local-$$} DISCO_RESTART=${DISCO_RESTART:-0}
JOB=$DISCO_JOB RESTART=$DISCO_RESTART
cancelled() { [ -e "$ATTEMPT/cancel" ]; }
put_back() {
  trap - TERM INT HUP USR1 USR2
  DISCO_RESTART=$((RESTART + 1)) exec bash "$SCRIPT"
}
"""


@dataclass(frozen=True)
class Placement:
    """Where things of a submission are."""

    script: Path
    """Where the script itself is, for the follow-up job."""

    code: Path
    """The snapshot that the ranks run."""

    working_folder: Path
    """Where train.py's relative paths start."""

    runs: tuple[Path, ...]
    """One run folder, or one per member of an array."""

    is_array: bool = False
    """Members are chosen by SLURM_ARRAY_TASK_ID, counted from 0."""

    python: str = sys.executable


def script_body(resources: Resources, placement: Placement) -> str:
    """Everything after the ``#SBATCH`` lines."""
    is_local = resources.cluster == "local"
    limits = resources.limits
    lines = [
        "# A warning may come while the site is being set up.",
        'SEEN=; for name in TERM INT HUP USR1 USR2; do trap "SEEN=SIG$name" $name; done',
        f"cd {shlex.quote(str(placement.working_folder))} || exit 1",
    ]
    lines += _run_dir(placement)
    lines += [
        f"SCRIPT={shlex.quote(str(placement.script))}",
        f"REQUEUE={int(resources.requeue)} TIME_SECONDS={_seconds(resources)}"
        f" LEAD_SECONDS={resources.signal_lead_seconds}",
        f"LIMIT_PREEMPTIONS={limits.preemptions} LIMIT_TIMEOUTS={limits.timeouts}"
        f" LIMIT_FAILURES={limits.failures}",
        "",
        "# ---- the site ----",
        *resources.setup,
        *(f"export {k}={shlex.quote(v)}" for k, v in rank_variables(resources).items()),
        "",
        "# ---- how ranks start ----",
        (LOCAL_PARTS if is_local else SLURM_PARTS).rstrip(),
        "start_ranks() {",
        f"  {_start_command(resources, placement)}",
        "}",
        "report() {",
        f'  {shlex.quote(placement.python)} {_worker(placement)} report "$ATTEMPT"',
        "}",
        "",
        # Only now: what sites offer, such as module, may use variables that are not set.
        "set -u",
        PROTOCOL.read_text(),
    ]
    return "\n".join(lines)


def _seconds(resources: Resources) -> int:
    # On one machine there is no limit.
    return 10**9 if resources.cluster == "local" else resources.time_minutes * 60


def _run_dir(placement: Placement) -> list[str]:
    if not placement.is_array:
        return [f"RUN_DIR={shlex.quote(str(placement.runs[0]))}"]
    return [
        "# One run folder per member.",
        "RUN_DIRS=(",
        *(f"  {shlex.quote(str(run))}" for run in placement.runs),
        ")",
        "RUN_DIR=${RUN_DIRS[$SLURM_ARRAY_TASK_ID]}",
    ]


def rank_variables(resources: Resources) -> dict[str, str]:
    """Variables that all ranks share: threads, then the network's, then the profile's."""
    threads = {"OMP_NUM_THREADS": str(resources.cpus_per_gpu)} if resources.cpus_per_gpu else {}
    elastic = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "QUIT"} if resources.runner == "torchrun" else {}
    return {"PYTHONUNBUFFERED": "1", **threads, **elastic, **resources.environment}


def _worker(placement: Placement) -> str:
    return shlex.quote(str(placement.code / "disco_worker.py"))


def _start_command(resources: Resources, placement: Placement) -> str:
    per_node = resources.local_world_size
    if resources.cluster == "local":
        start = f"{shlex.quote(placement.python)} {_worker(placement)} spawn"
        return f'{start} {resources.nodes} {per_node} "$RUN_DIR"'
    parts = [*srun_arguments(resources), *_container_options(resources, placement)]
    joined = [*map(shlex.quote, parts), _output(resources), *_command(resources, placement)]
    return " \\\n    ".join([f"srun {joined[0]}", *joined[1:]])


def srun_arguments(resources: Resources) -> list[str]:
    """Arguments of srun: all ranks share one fate, and each gets its cores."""
    per_node = 1 if resources.runner == "torchrun" else resources.local_world_size
    arguments = [
        f"--nodes={resources.nodes}",
        f"--ntasks={resources.nodes * per_node}",
        f"--ntasks-per-node={per_node}",
        "--kill-on-bad-exit=1",
        f"--wait={WAIT_SECONDS}",
        "--unbuffered",
    ]
    if (cpus := cpus_per_task(resources)) is not None:
        # Not inherited from sbatch since Slurm 22.05.
        arguments.append(f"--cpus-per-task={cpus}")
    return [*arguments, *resources.srun]


def cpus_per_task(resources: Resources) -> int | None:
    """CPU cores of one srun task."""
    if resources.cpus_per_gpu is None:
        return None
    ranks = resources.local_world_size if resources.runner == "torchrun" else 1
    return resources.cpus_per_gpu * ranks


def _output(resources: Resources) -> str:
    # Under torchrun each rank opens its own file.
    name = "node-%n.log" if resources.runner == "torchrun" else "rank-%t.log"
    return f'--output="$ATTEMPT/{name}"'


def _mounts(resources: Resources, placement: Placement) -> list[str]:
    """The working folder, the code and the run folders under their own names, then the user's."""
    runs = [run.parent if placement.is_array else run for run in placement.runs]
    folders = [placement.working_folder, placement.code, *runs]
    own = [f"{folder}:{folder}" for folder in dict.fromkeys(map(str, folders))]
    return [*own, *resources.container.mounts]


def _container_options(resources: Resources, placement: Placement) -> list[str]:
    container = resources.container
    if container.runtime != "pyxis":
        return []
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(_mounts(resources, placement))}",
        f"--container-workdir={placement.working_folder}",
        *container.arguments,
    ]


def _command(resources: Resources, placement: Placement) -> Sequence[str]:
    container = resources.container
    prefix: list[str] = []
    if container.runtime == "apptainer":
        binds = [part for mount in _mounts(resources, placement) for part in ("--bind", mount)]
        prefix = ["apptainer", "exec", "--nv", *binds, "--pwd", str(placement.working_folder)]
        prefix += [*container.arguments, str(container.image)]
    python = placement.python if container.runtime == "none" else container.python
    worker = [python, "-u"]
    if resources.runner == "torchrun":
        # Warnings are for the ranks; torchrun itself would end them.
        ignore = 'trap "" USR1 USR2 TERM; exec "$@"'
        prefix += ["bash", "-c", ignore, "torchrun"]
        worker = [python, "-m", "torch.distributed.run", "--standalone"]
        worker += ["--nnodes=1", f"--nproc_per_node={resources.local_world_size}"]
    return [" ".join(map(shlex.quote, [*prefix, *worker])), f'{_worker(placement)} "$RUN_DIR"']
