"""What a job asks for, and the site it runs on: profiles in YAML, flags over them."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from disco_ds.config import from_plain

Cluster = Literal["slurm", "local", "debug"]
Runner = Literal["srun", "torchrun"]

NETWORKS: dict[str, dict[str, str]] = {
    "none": {},
    "tcp": {"NCCL_IB_DISABLE": "1"},
    "infiniband": {
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_IB_RETRY_CNT": "7",
        "RDMAV_FORK_SAFE": "1",  # data workers are forked
    },
    "efa": {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"},
}
"""Environment presets for ``network``; ``env`` overrides single values."""


@dataclass(frozen=True)
class ContainerConfig:
    """A container in which the ranks run; requeueing stays outside."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """pyxis adds --container-* to srun; apptainer wraps the command."""

    image: str | None = None
    """Image: a path, or an address that the runtime knows."""

    mounts: tuple[str, ...] = ()
    """Folders to mount, as host:container. The working folder and the run folder always are."""

    python: str = "python"
    """Interpreter inside the image."""

    arguments: tuple[str, ...] = ()
    """More arguments for the runtime."""

    def __post_init__(self) -> None:
        if (self.runtime == "none") != (self.image is None):
            raise ValueError(
                f"container.runtime {self.runtime} with container.image {self.image}: give both "
                "or neither"
            )


@dataclass(frozen=True)
class Limits:
    """How often a run goes back into the queue by itself, counted separately by cause."""

    preemptions: int = 100
    """Stopped for another job, or re-queued by Slurm (a lost node too)."""

    timeouts: int = 100
    """Stopped near the time limit."""

    failures: int = 0
    """Ended with an error; wrong input (exit status 2) is never tried again."""

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value < 0:
                raise ValueError(f"limits.{name} {value}: must not be negative")


@dataclass(frozen=True)
class Resources:
    """Nodes, GPUs and the settings of a site."""

    cluster: Cluster = "slurm"
    """slurm; local: processes on this machine, with virtual nodes; debug: one process, here."""

    nodes: int = 1
    """Number of nodes."""

    gpus_per_node: int = 1
    """GPUs on each node; one rank each. 0 for CPU nodes."""

    ranks_per_node: int | None = None
    """Ranks on each node; one per GPU when not given."""

    cpus_per_gpu: int | None = None
    """CPU cores for each rank and its data workers."""

    mem_gb: float | None = None
    """Memory of each node in GB; the site's default when not given, 0 for all of it."""

    time: str = "1-00:00:00"
    """Time limit of one attempt: minutes, HH:MM:SS or D-HH:MM:SS."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    """Nodes not to use, in Slurm's notation."""

    sbatch: dict[str, str] = field(default_factory=dict)
    """Any other option of sbatch, without the dashes; "true" for one without a value."""

    srun: tuple[str, ...] = ()
    """More arguments for srun."""

    setup: tuple[str, ...] = ()
    """Shell lines before the ranks start, such as module load cuda."""

    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""

    network: Literal["none", "tcp", "infiniband", "efa"] = "none"
    """Environment preset for the fabric."""

    container: ContainerConfig = field(default_factory=ContainerConfig)

    runner: Runner = "srun"
    """srun: one task per rank. torchrun: one task per node that starts its ranks."""

    signal: Literal["USR1", "USR2", "TERM", "HUP"] = "USR2"
    """Signal by which Slurm warns the batch shell."""

    signal_lead_seconds: int = 120
    """How long before the time limit the warning comes (Slurm may send it 60 s earlier)."""

    requeue: bool = True
    """Go back into the queue under the same job id; false where the site forbids it: then a
    follow-up job that depends on this one continues."""

    limits: Limits = field(default_factory=Limits)

    max_parallel: int | None = None
    """Members of an array that run at the same time; all of them when not given."""

    def __post_init__(self) -> None:
        for name, lowest in (
            ("nodes", 1),
            ("gpus_per_node", 0),
            ("ranks_per_node", 1),
            ("cpus_per_gpu", 1),
            ("max_parallel", 1),
            ("signal_lead_seconds", 1),
            ("mem_gb", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name} {value}: must be at least {lowest}")
        if self.gpus_per_node and self.ranks_per_node not in (None, self.gpus_per_node):
            raise ValueError(
                f"ranks_per_node {self.ranks_per_node} with gpus_per_node {self.gpus_per_node}: "
                "there is one rank per GPU; leave ranks_per_node out"
            )
        if self.time_minutes * 60 <= self.signal_lead_seconds and self.cluster == "slurm":
            raise ValueError(
                f"signal_lead_seconds {self.signal_lead_seconds}: not below the time limit "
                f"{self.time}"
            )
        if self.cluster == "debug" and self.world_size > 1:
            raise ValueError(
                f"--cluster debug is one process, not {self.nodes} nodes with "
                f"{self.local_world_size} ranks: leave nodes and ranks out, or --cluster local"
            )
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"env {name}: not the name of an environment variable")

    @property
    def local_world_size(self) -> int:
        """Ranks on each node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.local_world_size

    @property
    def time_minutes(self) -> int:
        """The time limit of one attempt in whole minutes."""
        match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d\d?))?(?::(\d\d?))?", self.time)
        if match is None:
            raise ValueError(f"time {self.time}: expected minutes, HH:MM:SS or D-HH:MM:SS")
        days, first, second, third = (int(part or 0) for part in match.groups())
        if match[1] is not None or match[4] is not None:
            minutes = days * 1440 + first * 60 + second + (third > 0)
        else:
            minutes = first + (second > 0)
        if minutes < 1:
            raise ValueError(f"time {self.time}: must be at least a minute")
        return minutes

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks: the preset of the network, then those of the profile."""
        return {**NETWORKS[self.network], **self.env}


def load_profile(path: str | Path) -> Resources:
    """A site profile: YAML with the fields of :class:`Resources`.

    Raises:
        ValueError: no such file, not YAML, an unknown key (naming the nearest), a wrong value.
    """
    return typing.cast(Resources, read_yaml(Path(path), "--profile", Resources))


def read_yaml(path: Path, flag: str, cls: type) -> object:
    """A YAML file as a configuration dataclass.

    Raises:
        ValueError: naming the flag, the file and the key.
    """
    try:
        return from_plain(cls, _with_strings(parse_yaml(path, flag, SimpleLoader) or {}))
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {str(error).removeprefix(f'{flag} {path}: ')}") from error


def parse_yaml(path: Path, flag: str, loader: type[yaml.SafeLoader | yaml.BaseLoader]) -> object:
    """The content of a YAML file.

    Raises:
        ValueError: no such file, or not YAML.
    """
    try:
        return yaml.load(path.read_text(), loader)
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot read it ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{flag} {path}: not YAML: {' '.join(str(error).split())}") from error


class SimpleLoader(yaml.SafeLoader):
    """YAML without base 60: ``24:00:00`` is text, not 86400."""


SimpleLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith((":int", ":float"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
SimpleLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")
)
SimpleLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)

# A number where text is meant: time: 90, NCCL_DEBUG: 1.
TEXT_KEYS = ("time", "exclude", "account", "qos", "partition", "constraint", "reservation")
TEXT_MAPS = ("env", "sbatch")


def _with_strings(content: object) -> object:
    if not isinstance(content, dict):
        return content
    values = {str(key): value for key, value in content.items()}
    for key in TEXT_KEYS:
        if isinstance(values.get(key), int):
            values[key] = str(values[key])
    for key in TEXT_MAPS:
        if isinstance(values.get(key), dict):
            values[key] = {str(k): str(v) for k, v in values[key].items()}
    return values
