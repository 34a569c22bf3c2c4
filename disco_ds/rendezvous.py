"""How ranks find each other without agreeing on a port: rank 0 binds a free one and says which.

Port arithmetic clashes: with another job on the node, with the socket of any client. Here rank 0
lets the kernel choose, keeps the socket, and writes host names and port to a file that all ranks
see, by atomic rename. The file belongs to one attempt of one job.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from disco_ds.ranks import RENDEZVOUS_VARIABLE

CONNECT_SECONDS = 10


def store_from_environment(
    rank: int, world_size: int, environ: MutableMapping[str, str], *, timeout_seconds: float
) -> TCPStore | None:
    """The store of the group when ``DISCO_RENDEZVOUS`` names a file, else None.

    Sets MASTER_ADDR and MASTER_PORT to where the store is, for libraries that read them.

    Raises:
        TimeoutError: rank 0 did not come, naming the file.
        ConnectionError: none of its addresses answers.
    """
    path = environ.get(RENDEZVOUS_VARIABLE)
    if path is None:
        return None
    host, store = meet(Path(path), rank, world_size, timeout_seconds=timeout_seconds)
    environ.update(MASTER_ADDR=host, MASTER_PORT=str(store.port))
    return store


def meet(path: Path, rank: int, world_size: int, *, timeout_seconds: float) -> tuple[str, TCPStore]:
    """Meet the other ranks through a file; returns rank 0's host name and the store."""
    options: dict[str, Any] = {
        "world_size": world_size,
        "timeout": timedelta(seconds=timeout_seconds),
        "wait_for_workers": False,
    }
    if rank == 0:
        store = TCPStore("localhost", 0, is_master=True, **options)
        hosts = _own_names()
        _publish(path, {"hosts": hosts, "port": store.port})
        return hosts[0], store
    found = _await(path, timeout_seconds)
    host = _reachable(found["hosts"], found["port"])
    return host, TCPStore(host, found["port"], is_master=False, **options)


def _own_names() -> list[str]:
    """Names and addresses by which other nodes may know this one, the best first."""
    name = socket.gethostname()
    addresses = []
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(name, None)]
    except OSError:
        pass
    elsewhere = [a for a in addresses if not a.startswith("127.") and a != "::1"]
    names = [os.environ.get("SLURMD_NODENAME", ""), name, socket.getfqdn(), *elsewhere]
    return list(dict.fromkeys(filter(None, names)))


def _publish(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def _await(path: Path, timeout_seconds: float) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 did not write {path} within {timeout_seconds:g} s: see its log; the "
                "folder must be on a file system that all nodes share"
            )
        # A listing makes a network file system look again.
        if path.parent.exists():
            list(path.parent.iterdir())
        time.sleep(0.05)
    return json.loads(path.read_text())


def _reachable(hosts: list[str], port: int) -> str:
    reasons = []
    for host in hosts:
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            return host
        except OSError as error:
            reasons.append(f"{host}: {error}")
    raise ConnectionError(f"cannot reach rank 0 on port {port} ({'; '.join(reasons)})")
