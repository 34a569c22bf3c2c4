"""The part of srun on one machine: processes on virtual nodes, one output file each, one fate."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

KILL_SECONDS = 5


def spawn(nodes: int, local_world_size: int, command: Sequence[str]) -> int:
    """Run ``python COMMAND`` once per rank; the first failure ends the others.

    Reports like srun, on stderr: ``error: NODE: task RANK: Killed``. Returns the highest exit
    status, 128 + signal for a killed rank.
    """
    attempt = Path(os.environ["DISCO_ATTEMPT"])
    try:
        environments = rank_environments(nodes, local_world_size, dict(os.environ))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    processes = []
    for rank, environment in enumerate(environments):
        with (attempt / f"rank-{rank}.log").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-u", *command],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return _wait(processes, [environment["DISCO_NODE"] for environment in environments])


def rank_environments(
    nodes: int, local_world_size: int, environ: dict[str, str]
) -> list[dict[str, str]]:
    """The variables of each rank; GPUs, if there are any, are dealt out to the virtual nodes.

    Raises:
        ValueError: some GPUs, but fewer than ranks.
    """
    world_size = nodes * local_world_size
    devices = visible_devices(environ)
    if devices and len(devices) < world_size:
        raise ValueError(
            f"{world_size} ranks on this machine, but {len(devices)} GPUs are visible: ask for "
            "fewer, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    result = []
    for rank in range(world_size):
        node, local_rank = divmod(rank, local_world_size)
        values = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local_world_size,
            "NODE_RANK": node,
            "DISCO_NODE": f"local{node}",
            # Looking up the own host name is unreliable on laptops.
            "GLOO_SOCKET_IFNAME": environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        if devices:
            own = devices[node * local_world_size : (node + 1) * local_world_size]
            values["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        result.append({name: str(value) for name, value in values.items()})
    return result


def visible_devices(environ: dict[str, str]) -> list[str]:
    """GPUs that processes here may use, as CUDA_VISIBLE_DEVICES names them."""
    if (chosen := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device for device in chosen.split(",") if device and device != "-1"]
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted((match[1] for match in found if match), key=int)


def _wait(processes: list[subprocess.Popen[bytes]], nodes: list[str]) -> int:
    running = dict(enumerate(processes))
    deadline = None
    while running:
        for rank, process in list(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[rank]
            if code:
                sys.stderr.write(f"error: {nodes[rank]}: task {rank}: {_how(code)}\n")
                if deadline is None:
                    sys.stderr.write("Terminating the other ranks\n")
                    deadline = time.monotonic() + KILL_SECONDS
                    _signal(running, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            _signal(running, signal.SIGKILL)
        time.sleep(0.05)
    return max(128 - p.returncode if p.returncode < 0 else p.returncode for p in processes)


def _signal(running: dict[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in running.values():
        process.send_signal(number)


def _how(code: int) -> str:
    if code < 0:
        return "Killed" if -code == signal.SIGKILL else signal.Signals(-code).name
    return f"Exited with exit code {code}"
