"""Ranks from the variables of every launcher, and how ranks meet without a port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from disco_ds.distributed import World, device_index, setup_logging
from disco_ds.launch.spawn import rank_environments
from disco_ds.ranks import expand_host_list, expand_tasks_per_node, resolve_ranks
from disco_ds.rendezvous import meet

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    # Of the job, and wrong for the step:
    "SLURM_NTASKS": "9",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu[06-08]",
    "SLURM_TASKS_PER_NODE": "3(x3)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# A task that submitit started: srun's step, and submitit's own variables.
SUBMITIT = {**STEP, "SUBMITIT_EXECUTOR": "slurm"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, (3, 4, 1, 2, "n1", "RANK and WORLD_SIZE")),
        (STEP, (3, 5, 0, 2, "gpu07", "srun's step")),
        (SUBMITIT, (3, 5, 0, 2, "gpu07", "srun's step")),
        (OPEN_MPI, (1, 2, 1, 2, "127.0.0.1", "Open MPI")),
        (PMI | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, (3, 4, 1, 2, "a", "PMI")),
        ({}, (0, 1, 0, None, None, "one process")),
        # One task, for instance an interactive shell: one process, whatever the job is.
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0, None, None, "one process")),
    ],
)
def test_each_launcher(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    found = resolve_ranks(environ)
    assert expected == (
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.master_addr,
        found.source,
    )


def test_conflicts_follow_the_documented_order_and_are_announced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = resolve_ranks({**OPEN_MPI, **STEP, **TORCHRUN})
    assert found.source == "RANK and WORLD_SIZE"
    assert found.overruled == ("srun's step (rank 3 of 5)", "Open MPI (rank 1 of 2)")
    setup_logging(World(ranks=found))
    assert "ranks from RANK and WORLD_SIZE, not from srun's step (rank 3 of 5) or Open MPI" in (
        capsys.readouterr().err
    )
    assert resolve_ranks({**OPEN_MPI, **STEP}).source == "srun's step"
    # Agreement is no conflict.
    agreeing = {**OPEN_MPI, **TORCHRUN, "RANK": "1", "WORLD_SIZE": "2"}
    assert resolve_ranks(agreeing).overruled == ()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "first"}, "RANK='first': must be a whole number"),
        (PMI, "MASTER_ADDR and MASTER_PORT is not set"),
        (
            {"SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "start the ranks with srun",
        ),
    ],
)
def test_wrong_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_ranks(environ)


def test_two_steps_get_different_ports() -> None:
    others = [{"SLURM_JOB_ID": "78"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
    ports = [resolve_ranks({**STEP, **other}).master_port for other in ({}, *others)]
    assert len(set(ports)) == 4
    assert all(15000 <= int(port or 0) < 32767 for port in ports)
    assert resolve_ranks({**STEP, "SLURM_STEP_RESV_PORTS": "16934-16935"}).master_port == "16934"


def test_slurm_notation() -> None:
    assert expand_host_list("n[01-03,7],login") == ["n01", "n02", "n03", "n7", "login"]
    assert expand_host_list("r[1-2]c[09-10]") == ["r1c09", "r1c10", "r2c09", "r2c10"]
    assert expand_tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_device_is_the_one_that_slurm_binds() -> None:
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    # --gpus-per-task: every rank sees its own as number 0.
    assert [device_index(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="LOCAL_RANK=2 but 2 CUDA devices"):
        device_index(2, 2)


def test_gpus_are_dealt_out_to_virtual_nodes() -> None:
    found = rank_environments(2, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    devices = [values["CUDA_VISIBLE_DEVICES"] for values in found]
    assert devices == ["4,5", "4,5", "6,7", "6,7"]
    assert [values["DISCO_NODE"] for values in found] == ["local0", "local0", "local1", "local1"]
    assert [values["LOCAL_RANK"] for values in found] == ["0", "1", "0", "1"]
    with pytest.raises(ValueError, match="4 ranks on this machine, but 1 GPUs"):
        rank_environments(2, 2, {"CUDA_VISIBLE_DEVICES": "0"})


def test_ranks_meet_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "attempt" / "rendezvous.json"
    found: dict[int, object] = {}

    def join(rank: int) -> None:
        host, store = meet(path, rank, 3, timeout_seconds=30)
        found[rank] = (host, store)
        store.set(f"here {rank}", str(rank))
        store.wait([f"here {other}" for other in range(3)])

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2]
    published = json.loads(path.read_text())
    # The kernel chose a port that nobody had; somebody has it now.
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("", published["port"]))


def test_a_rank_that_waits_in_vain_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 did not write .*nobody.json within 0\.3 s"):
        meet(tmp_path / "nobody.json", 1, 2, timeout_seconds=0.3)


def test_environment_is_completed_for_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    world = World.from_environment("cpu")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    exported = {name: os.environ[name] for name in names}
    for name in (*names, "NODE_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # known to monkeypatch now, which removes it
    assert (world.rank, world.world_size, world.local_rank) == (3, 5, 0)
    assert list(exported.values()) == ["3", "5", "0", "2", "gpu07"]


SHIELD = """
import os, signal, subprocess, sys, time
from disco_ds.preemption import listen_for_stop, stop_reason
from disco_ds.launch.worker import shield_children
listen_for_stop()
shield_children()
compiler = subprocess.Popen(["sleep", "60"])
print(compiler.pid, flush=True)
while stop_reason() is None:
    time.sleep(0.05)
time.sleep(0.5)
print(stop_reason(), compiler.poll(), flush=True)
compiler.kill()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_all_processes_stops_the_rank_and_spares_its_children(number: int) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", SHIELD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert rank.stdout is not None
    rank.stdout.readline()
    os.killpg(rank.pid, number)
    said, _ = rank.communicate(timeout=60)
    assert said.split() == [signal.Signals(number).name, "None"]


def test_a_rank_listens_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys, disco_ds.launch.worker; print({'torch', 'numpy', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
