"""What each rank's variables will be, for ``--dry_run``: resolved as in the rank itself."""

from __future__ import annotations

import shlex

from disco_ds.launch.resources import Resources
from disco_ds.launch.script import rank_variables
from disco_ds.launch.spawn import rank_environments
from disco_ds.ranks import RENDEZVOUS_VARIABLE, resolve_ranks

DECIDED_LATER = {
    "MASTER_ADDR": "<node of rank 0>",
    "MASTER_PORT": "<a free port that rank 0 binds>",
    RENDEZVOUS_VARIABLE: "<attempt>/rendezvous.json",
    "DISCO_STOP_FILE": "<attempt>/stop",
}


def rank_table(resources: Resources) -> str:
    """One line for each rank."""
    common = rank_variables(resources)
    lines = []
    for rank in range(resources.world_size):
        values = {**_own(resources, rank), **DECIDED_LATER, **common}
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())
        lines.append(f"# rank {rank}: {words}")
    return "\n".join(lines)


def _own(resources: Resources, rank: int) -> dict[str, str]:
    per_node = resources.local_world_size
    if resources.cluster == "local":
        return rank_environments(resources.nodes, per_node, {"CUDA_VISIBLE_DEVICES": ""})[rank]
    node, local_rank = divmod(rank, per_node)
    if resources.world_size == 1:
        values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        values["NODE_RANK"] = "0"
    else:
        step = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_TASKS": str(resources.world_size),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{resources.nodes})",
        }
        values = resolve_ranks(step).variables()
    if resources.gpus_per_node:
        values["CUDA_VISIBLE_DEVICES"] = "<as Slurm binds>"
    return values
