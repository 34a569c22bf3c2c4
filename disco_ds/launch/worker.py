"""One rank of a submitted run: resolves who it is, runs train.py, leaves a note when it fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disco_ds.preemption import EXIT_PREEMPTED, STOP_SIGNALS, listen_for_stop
from disco_ds.ranks import Ranks, resolve_ranks

SAVED_MARK = "saved"
PATIENCE_SECONDS = 30


def main() -> int:
    """Entry point of a snapshot: ``disco_worker.py RUN_DIR``, ``spawn ...`` or ``report ...``."""
    command, *arguments = sys.argv[1:]
    if command == "spawn":
        from disco_ds.launch.spawn import spawn

        return spawn(int(arguments[0]), int(arguments[1]), [sys.argv[0], *arguments[2:]])
    if command == "report":
        from disco_ds.launch.failure import print_report

        return print_report(Path(arguments[0]))
    return run_rank(Path(command), Path(os.environ["DISCO_ATTEMPT"]))


def run_rank(run_dir: Path, attempt: Path) -> int:
    """Run this rank to its end; returns the exit status of train.py."""
    listen_for_stop()
    shield_children()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _join_nodes(os.environ)
    ranks = resolve_ranks(os.environ)
    ranks.export(os.environ)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _write_own_log(attempt, ranks.rank)
    _introduce(attempt, ranks)
    status, reason = _train(run_arguments(run_dir))
    if status == EXIT_PREEMPTED:
        _leave_saved(attempt, ranks.rank)
    if status:
        note_failure(attempt, ranks.rank, status, reason)
    return status


def shield_children() -> None:
    """Keep stop signals from data workers, compilers and other children; this process hears them.

    Slurm signals every process of a step. A blocked signal stays blocked in children, across exec
    too; in this process one thread of its own receives it, and Python's handler runs as usual.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def receive() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Event().wait()

    threading.Thread(target=receive, name="stop-signals", daemon=True).start()


def run_arguments(run_dir: Path) -> list[str]:
    """Arguments of train.py: those submitted, in this run folder, from its newest checkpoint.

    A ``--resume`` of the user's is where the run starts as long as it has no checkpoint itself.
    """
    spec = json.loads((run_dir / "launch" / "spec.json").read_text())
    has_checkpoint = any((run_dir / "checkpoints").glob("step_*"))
    first = None if has_checkpoint else spec["resume"]
    return [*spec["arguments"], "--run_dir", str(run_dir), "--resume", first or "latest"]


def _join_nodes(environ: Any) -> None:
    """Under one torchrun per node: ranks over all nodes, from the step's variables.

    torchrun's own meeting point is per node; the ranks meet through the rendezvous file.
    """
    local_size = int(environ["LOCAL_WORLD_SIZE"])
    node, nodes = int(environ.get("SLURM_NODEID", 0)), int(environ.get("SLURM_STEP_NUM_NODES", 1))
    rank = node * local_size + int(environ["LOCAL_RANK"])
    environ.update(RANK=str(rank), WORLD_SIZE=str(nodes * local_size), NODE_RANK=str(node))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)


def _write_own_log(attempt: Path, rank: int) -> None:
    log = os.open(attempt / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)


def _introduce(attempt: Path, ranks: Ranks) -> None:
    """Say where this rank is, for people and for `status`."""
    content = {
        **ranks.variables(),
        "node": node_name(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "source": ranks.source,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "stop_file": os.environ.get("DISCO_STOP_FILE"),
        "cpus": len(os.sched_getaffinity(0)),
    }
    (attempt / f"rank-{ranks.rank}.json").write_text(json.dumps(content, indent=2) + "\n")


def node_name() -> str:
    """The node as Slurm, or the virtual nodes of the local cluster, call it."""
    name = os.environ.get("SLURMD_NODENAME") or os.environ.get("DISCO_NODE")
    return name or socket.gethostname()


def _train(arguments: Sequence[str]) -> tuple[int, str]:
    """Run train.py's function; returns the exit status and, for an exception, its last line."""
    try:
        from disco_ds.cli import train

        return train(arguments), ""
    except SystemExit as stop:
        return (stop.code if isinstance(stop.code, int) else 1), ""
    except BaseException as error:
        traceback.print_exc()
        return 1, "".join(traceback.format_exception_only(error)).strip()


def _leave_saved(attempt: Path, rank: int) -> None:
    """The main rank leaves first: srun ends all ranks when the first one leaves with a status."""
    mark = attempt / SAVED_MARK
    if rank == 0:
        mark.touch()
        return
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)


def note_failure(attempt: Path, rank: int, status: int, reason: str) -> None:
    """What this rank knows about its end, for the failure report."""
    if status == EXIT_PREEMPTED:
        return
    content = {
        "rank": rank,
        "time": time.time(),
        "node": node_name(),
        "status": status,
        "reason": reason,
    }
    (attempt / f"failure-{rank}.json").write_text(json.dumps(content) + "\n")
