"""Which rank is this process? One answer from the variables of every launcher.

The first of these that is present wins, and what it overrules is said in the log:

1. ``RANK`` and ``WORLD_SIZE``: torchrun, deepspeed, accelerate, ``launchers/slurm.py``;
2. srun's step: ``SLURM_PROCID`` with ``SLURM_STEP_NUM_TASKS`` above 1. Variables of the *job* are
   never taken for those of a step;
3. MPI: Open MPI's ``OMPI_COMM_WORLD_*``, or ``PMI_RANK`` and ``PMI_SIZE``;
4. none of them: one process.

Standard library only.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

RENDEZVOUS_VARIABLE = "DISCO_RENDEZVOUS"
"""Path of the file through which ranks find each other, instead of MASTER_ADDR and _PORT."""

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LOWEST_PORT, HIGHEST_PORT = 15000, 32767
"""Below the range from which kernels take the ports of clients."""


@dataclass(frozen=True)
class Ranks:
    """The place of a process in its run, and who says so."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    """Ranks on this node, where the launcher says."""
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: str | None = None
    source: str = "one process"
    overruled: tuple[str, ...] = ()
    """Other sources that say something else, in words."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"RANK={self.rank} does not fit WORLD_SIZE={self.world_size}")

    def variables(self) -> dict[str, str]:
        """What torchrun would have set, for the libraries that read it."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "NODE_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Put :meth:`variables` into an environment."""
        environ.update(self.variables())


def resolve_ranks(environ: Mapping[str, str]) -> Ranks:
    """The ranks that these environment variables mean, by the order above.

    Raises:
        ValueError: incomplete or contradicting variables, naming them and the remedy; also in the
            shell of a multi-node job, where srun is missing.
    """
    candidates = [
        found
        for read in (_from_launcher, _from_step, _from_mpi)
        if (found := read(environ)) is not None
    ]
    if not candidates:
        _refuse_batch_shell(environ)
        return Ranks()
    chosen, *others = candidates
    overruled = tuple(
        f"{other.source} (rank {other.rank} of {other.world_size})"
        for other in others
        if (other.rank, other.world_size) != (chosen.rank, chosen.world_size)
    )
    return Ranks(**{**chosen.__dict__, "overruled": overruled})


def _from_launcher(environ: Mapping[str, str]) -> Ranks | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    needed = LAUNCHER_VARIABLES[:3] if RENDEZVOUS_VARIABLE in environ else LAUNCHER_VARIABLES
    missing = [name for name in needed if name not in environ]
    if missing:
        raise ValueError(
            f"launcher variables incomplete: {', '.join(missing)} not set. Start with "
            "deepspeed, torchrun, srun or plain python, or unset RANK and WORLD_SIZE."
        )
    return Ranks(
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world_size=_optional(environ, "LOCAL_WORLD_SIZE"),
        node_rank=_optional(environ, "NODE_RANK"),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=environ.get("MASTER_PORT"),
        source="RANK and WORLD_SIZE",
    )


def _from_step(environ: Mapping[str, str]) -> Ranks | None:
    """One srun task per rank; the variables of the step, never those of the job."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks == 1:
        return None
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if RENDEZVOUS_VARIABLE not in environ:
        hosts = expand_host_list(environ.get("SLURM_STEP_NODELIST", ""))
        address, port = address or next(iter(hosts), None), port or _step_port(environ)
    node = _optional(environ, "SLURM_NODEID") or 0
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    counts = expand_tasks_per_node(per_node)
    return Ranks(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=tasks,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=counts[node] if node < len(counts) else None,
        node_rank=node,
        master_addr=address,
        master_port=port,
        source="srun's step",
    )


def _step_port(environ: Mapping[str, str]) -> str:
    """The port that srun --resv-ports reserved, else one of this step's own."""
    if reserved := environ.get("SLURM_STEP_RESV_PORTS"):
        return re.split("[-,]", reserved)[0]
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    key = ".".join(environ.get(name, "0") for name in names)
    # Spread, since jobs that follow each other run side by side.
    return str(LOWEST_PORT + zlib.crc32(key.encode()) % (HIGHEST_PORT - LOWEST_PORT))


MPI_NAMES = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _from_mpi(environ: Mapping[str, str]) -> Ranks | None:
    for source, rank_name, size_name, local_rank_name, local_size_name in MPI_NAMES:
        if rank_name not in environ or size_name not in environ:
            continue
        size = _number(environ, size_name)
        if size == 1:
            continue
        local_size = _optional(environ, local_size_name)
        local_rank = _optional(environ, local_rank_name)
        one_node = local_size == size
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing and not one_node and RENDEZVOUS_VARIABLE not in environ:
            raise ValueError(
                f"{source} started {size} ranks on several nodes, but {' and '.join(missing)} "
                "is not set: export the first node's name and a free port (mpirun -x MASTER_ADDR "
                "-x MASTER_PORT ...)"
            )
        return Ranks(
            rank=_number(environ, rank_name),
            world_size=size,
            local_rank=local_rank if local_rank is not None else _number(environ, rank_name),
            local_world_size=local_size,
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=environ.get("MASTER_PORT") or _mpi_port(environ),
            source=source,
        )
    return None


def _mpi_port(environ: Mapping[str, str]) -> str:
    # The names that a run's ranks share and two runs on one machine do not.
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDRA_CONTROL_FD")
    key = ".".join(environ.get(name, "") for name in names)
    return str(LOWEST_PORT + zlib.crc32(key.encode()) % (HIGHEST_PORT - LOWEST_PORT))


def _refuse_batch_shell(environ: Mapping[str, str]) -> None:
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_STEP_NUM_TASKS" not in environ and nodes != "1":
        raise ValueError(
            f"this is the shell of a Slurm job on {nodes} nodes, not a task of it: start the ranks "
            "with srun, or submit with launchers/slurm.py (for one process on purpose, unset "
            "SLURM_JOB_NUM_NODES)"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r}: must be a whole number") from None


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def expand_tasks_per_node(text: str) -> list[int]:
    """Slurm's ``2(x3),1`` as ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"tasks per node {text!r}: expected Slurm's form, such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_host_list(text: str) -> list[str]:
    """Slurm's ``n[01-03,7],login`` as ``["n01", "n02", "n03", "n7", "login"]``."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        hosts += _expand_brackets(part)
    return hosts


def _expand_brackets(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    names: list[str] = []
    for piece in match[1].split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            name = part[: match.start()] + str(number).zfill(len(first)) + part[match.end() :]
            names += _expand_brackets(name)
    return names
