"""Why a run failed: the rank that failed first, where, its last lines, and a hint.

Ranks leave a note when they end with an error; srun, or what stands for it on one machine, says
which were killed. Most ranks fail only because another did. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

LAST_LINES = 12

# Fails because a neighbour is gone.
SECONDARY = re.compile(
    r"lost contact with another rank|closed by peer|Connection reset|Connection refused"
    r"|Broken pipe|DistNetworkError|DistStoreError|remote process exited"
    r"|NCCL.*(unhandled system error|remote error)"
    r"|heartbeat|ProcessGroup.*abort",
    re.IGNORECASE,
)
LOST = re.compile(r"error: ([^\s:]+): tasks? ([\d,\-]+): (.+)")
# After this line srun, too, only reports what it killed itself.
TERMINATING = re.compile(r"Terminating|_step_signal|CANCELLED AT|Job step aborted")

HINTS = (
    (
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "GPU out of memory: a smaller --micro_batch_size, --model.activation_checkpointing True, "
        "a higher ZeRO stage",
    ),
    (
        r"Out Of Memory|oom.kill|Cannot allocate memory|MemoryError|DefaultCPUAllocator",
        "out of main memory: more mem_gb or cpus, fewer --data.num_workers",
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        "a port is taken: leave MASTER_PORT to the launcher (no MASTER_PORT in env or setup)",
    ),
    (
        r"checkpoint.*(not found|no such|missing|damaged)|No such file.*checkpoint"
        r"|error: .*--resume",
        "the checkpoint to resume from is missing or damaged: see --resume and RUN/checkpoints",
    ),
    (
        r"NCCL|ncclUnhandled|ProcessGroupNCCL",
        "NCCL: set env NCCL_DEBUG: INFO, and check network and NCCL_SOCKET_IFNAME in the profile",
    ),
    (r"[Tt]imed out|Timeout", "a rank did not come: see its log; --timeout_seconds is the limit"),
    (r"Connection closed by peer|Connection reset", "another rank ended; see the other logs"),
    (r"No space left on device", "a disk is full: run folder, /tmp or /dev/shm"),
    (
        r"[Kk]illed|SIGKILL",
        "killed from outside: main memory (see the node's kernel log), or somebody",
    ),
)


CAUSE = re.compile(r"^error: |^[\w.]*(Error|Exception|Killed|SIGKILL)\b")
NO_CAUSE = re.compile(r"[Ww]arning|starting fresh")


@dataclass(frozen=True)
class Failure:
    """The first cause."""

    rank: int | None
    node: str
    how: str
    """Exit status, signal or exception."""
    last_lines: tuple[str, ...]
    """Of this rank; of rank 0 when this one printed nothing."""
    hint: str | None
    log: Path | None

    def summary(self) -> str:
        """One line."""
        who = "the launcher" if self.rank is None else f"rank {self.rank}"
        where = f" on {self.node}" if self.node else ""
        return f"{who}{where}: {self.how}" + (f" ({self.hint})" if self.hint else "")

    def text(self) -> str:
        """All of it."""
        who = "no rank reported" if self.rank is None else f"first to fail: rank {self.rank}"
        lines = [f"{who}{f' on node {self.node}' if self.node else ''}: {self.how}"]
        if self.last_lines:
            lines += ["last lines:", *(f"  | {line}" for line in self.last_lines)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        if self.log:
            lines.append(f"log: {self.log}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Suspect:
    rank: int
    node: str
    how: str
    order: float
    is_secondary: bool


def explain(attempt: Path) -> Failure:
    """The first failure of an attempt, from what its ranks and its launcher left."""
    launcher = _lines(attempt / "launcher.log")
    suspects = [*_killed(launcher), *_noted(attempt)]
    suspects.sort(key=lambda suspect: (suspect.is_secondary, suspect.order))
    if not suspects:
        text = "\n".join(launcher)
        how = launcher[-1] if launcher else "ended without a word; see the job's own log"
        return Failure(None, "", how, tuple(launcher[-LAST_LINES:]), _hint(text), None)
    first = suspects[0]
    log = attempt / f"rank-{first.rank}.log"
    last = tuple(_lines(log)[-LAST_LINES:])
    how = next((line for line in reversed(last) if line.startswith("error: ")), first.how)
    hint = _hint(first.how) or _hint("\n".join(last))
    if not last:
        # It said nothing; rank 0 knows at least how far the run was.
        log = attempt / "rank-0.log"
        last = tuple(_lines(log)[-LAST_LINES:])
    return Failure(first.rank, first.node, how, last, hint, log if log.exists() else None)


def print_report(attempt: Path) -> int:
    """Print and keep the report; for the end of the job script."""
    text = explain(attempt).text()
    (attempt / "failure.txt").write_text(text + "\n")
    sys.stdout.write(f"{text}\n")
    return 0


def _killed(launcher: list[str]) -> list[_Suspect]:
    """Ranks that a signal ended, and those that could not even start, in the order of the log."""
    found = []
    is_secondary = False
    for position, line in enumerate(launcher):
        if match := LOST.search(line):
            ranks = [int(part.split("-")[0]) for part in match[2].split(",")]
            # A rank that ended by itself left a note with its time; without one it comes last.
            exited = match[3].startswith("Exited")
            order = 1e12 + position if exited else position
            found += [
                _Suspect(rank, match[1], match[3].strip(), order, is_secondary) for rank in ranks
            ]
        is_secondary |= bool(TERMINATING.search(line))
    return found


def _noted(attempt: Path) -> list[_Suspect]:
    found = []
    for path in attempt.glob("failure-*.json"):
        try:
            note = json.loads(path.read_text())
        except ValueError:
            continue
        how = note["reason"] or f"exit status {note['status']}"
        last = "\n".join(_lines(attempt / f"rank-{note['rank']}.log")[-LAST_LINES:])
        is_secondary = bool(SECONDARY.search(how) or SECONDARY.search(last))
        found.append(_Suspect(note["rank"], note["node"], how, note["time"], is_secondary))
    return found


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    # A progress bar rewrites its line.
    return [line.rsplit("\r", 1)[-1] for line in text.splitlines() if line.strip()]


def _hint(text: str) -> str | None:
    """From the line that says what went wrong, if there is one, else from all but warnings."""
    lines = [line for line in text.splitlines() if not NO_CAUSE.search(line)]
    for part in ([line for line in lines if CAUSE.search(line)], lines):
        joined = "\n".join(part)
        for pattern, hint in HINTS:
            if re.search(pattern, joined):
                return hint
    return None
