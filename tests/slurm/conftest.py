"""A real Slurm for the session, from tools/local_slurm.sh: what CI requires, others may lack."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "local_slurm.sh"
GPUS = 4
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    folder: Path

    @property
    def conf(self) -> str:
        return str(self.folder / "slurm.conf")

    def ask(self, *command: str) -> str:
        """Run a command of Slurm's on it."""
        environment = {**os.environ, "SLURM_CONF": self.conf}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def require_slurm() -> None:
    """Skip without Slurm, except where it must be there."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in NEEDED if shutil.which(name, path=search) is None]
    if not missing:
        return
    reason = f"{', '.join(missing)} not found: apt-get install slurmctld slurmd slurm-client munge"
    if os.environ.get("CI") or os.environ.get("DISCO_REQUIRE_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)


def bring_up(name: str, *options: str) -> Iterator[Cluster]:
    require_slurm()
    # Not below pytest's folders: their names are too long for a unix socket.
    folder = Path("/tmp") / f"disco-{name}-{os.getpid()}"
    gpus = ["--fake_gpus", str(GPUS)] if os.getuid() == 0 else []
    done = subprocess.run(
        [str(SCRIPT), "up", "--nodes", "4", *gpus, "--dir", str(folder), *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield Cluster(folder)
    finally:
        down = [str(SCRIPT), "down", "--dir", str(folder)]
        subprocess.run(down, stdin=subprocess.DEVNULL, check=True, timeout=120)


@pytest.fixture(scope="session")
def warning_cluster() -> Iterator[Cluster]:
    """Slurm announces a preemption with the signal that the job asked for."""
    yield from bring_up("w")


@pytest.fixture(scope="session")
def silent_cluster() -> Iterator[Cluster]:
    """A preempted job gets SIGTERM in its steps, no more; arrays have at most 3 members."""
    yield from bring_up("s", "--no_preempt_signal", "--max_array_size", "3")


@pytest.fixture
def slurm(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    """The cluster of this test, and an empty working folder."""
    name = getattr(request, "param", "warning_cluster")
    cluster: Cluster = request.getfixturevalue(name)
    monkeypatch.setenv("SLURM_CONF", cluster.conf)
    monkeypatch.chdir(tmp_path)
    return cluster
