"""On paper: the loss, and a whole training step, from 8 to 1024 GPUs. Nothing here was measured.

    python tools/bench/scaling.py [--model ViT-B-32] [--local_batch_size 512 4096]

Ours are the planner's closed forms, which its tests hold against a trace of the real step. Peers
are counted from their published algorithms; d is the feature size, b pairs on each of N GPUs make
B = b N, and a ring moves (N-1)/N of a collective:

* open_clip (local loss, gather with grad) under AMP: 6 products of b x B x d; fp32 features are
  gathered and their gradients reduced, 16 B d (N-1)/N bytes; memory 17 b B + 16 B d;
* DisCo-CLIP: the same, with gradients all-reduced, 24 B d (N-1)/N bytes;
* Inf-CL (ring): 10 products, 8 (3N-2) b d bytes, memory 62 b d.

(17 bytes per logit: from the loss memory that Inf-CL's paper reports for open_clip.) Time is a
floor: all products at the same ``flops x mfu``, bytes at the link, one after the other; latency,
overlap, exponentials and memory traffic are left out. Whole step: encoders and parameter gradients
(bf16, DDP) added, the same for all. Up to 8 GPUs share the inner link, more the outer one.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plots import redraw
from tables import show, write_csv

from disco_ds.losses.disco import DiscoConfig
from disco_ds.models import ModelConfig
from disco_ds.planner.comm import Account, loss_traffic
from disco_ds.planner.cost import Hardware, loss_products, wire_bytes
from disco_ds.planner.memory import loss_memory, peer_loss_memory
from disco_ds.planner.plan import make_plan
from disco_ds.planner.request import PlanRequest

RESULTS = Path(__file__).parent / "results" / "scaling.csv"
WORLDS = (8, 16, 64, 256, 1024)
INF_CL_BYTES = 62.0
OURS = {
    "ours": DiscoConfig(wire_dtype="bf16"),
    "ours, ring": DiscoConfig(wire_dtype="bf16", gather="ring"),
}


@dataclass(frozen=True)
class LossCost:
    """One loss at one size, per rank."""

    products: float
    received: float
    """Bytes."""
    memory: float
    """Bytes."""


def peer_cost(name: str, local: int, world_size: int, dim: int) -> LossCost:
    """By the table above."""
    batch, share = local * world_size, (world_size - 1) / world_size
    if name == "Inf-CL":
        received = 8.0 * (3 * world_size - 2) * local * dim
        return LossCost(10.0, received, INF_CL_BYTES * local * dim)
    memory = peer_loss_memory("disco_clip", local, world_size, dim)
    factor = {"open_clip": 16.0, "DisCo-CLIP": 24.0}[name]
    return LossCost(6.0, factor * batch * dim * share, memory)


def our_cost(request: PlanRequest, dim: int) -> LossCost:
    """By the planner."""
    account = Account()
    loss_traffic(account, request, dim)
    received = sum(wire_bytes(entry, request.world_size) for entry in account.traffic())
    return LossCost(loss_products(request), received, loss_memory(request, dim, like_cuda=True))


def rows_of(model: str, local: int, world_size: int, hardware: Hardware) -> list[dict[str, Any]]:
    """One line per loss, open_clip's first."""
    request = PlanRequest(
        ModelConfig(model, activation_checkpointing=True),
        global_batch_size=local * world_size,
        world_size=world_size,
        strategy="ddp",
    )
    plan = make_plan(request, hardware)
    dim = plan.profile.dim
    costs = {
        name: peer_cost(name, local, world_size, dim)
        for name in ("open_clip", "DisCo-CLIP", "Inf-CL")
    }
    costs |= {name: our_cost(request.with_(loss=loss), dim) for name, loss in OURS.items()}
    rate = hardware.intra if world_size <= hardware.gpus_per_node else hardware.link
    speed = hardware.flops * hardware.mfu

    def seconds(cost: LossCost) -> float:
        flops = cost.products * 2.0 * local * local * world_size * dim
        return flops / speed + cost.received / rate

    own = seconds(our_cost(request, dim))
    rest = plan.time.serial - own  # encoders and their gradients
    base = costs["open_clip"]
    return [
        {
            "model": model,
            "gpus": world_size,
            "global_batch": local * world_size,
            "loss": name,
            "products": round(cost.products, 2),
            "received_mb": round(cost.received / 1e6, 1),
            "received_ratio": round(cost.received / base.received, 3),
            "loss_memory_mb": round(cost.memory / 1e6, 1),
            "memory_ratio": round(cost.memory / base.memory, 4),
            "loss_ms": round(1e3 * seconds(cost), 2),
            "loss_ratio": round(seconds(cost) / seconds(base), 3),
            "step_ms": round(1e3 * (rest + seconds(cost)), 1),
            "step_ratio": round((rest + seconds(cost)) / (rest + seconds(base)), 3),
        }
        for name, cost in costs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="ViT-B-32")
    parser.add_argument("--local_batch_size", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    hardware = Hardware(memory=80e9)
    table = [
        row
        for local in options.local_batch_size
        for world_size in WORLDS
        for row in rows_of(options.model, local, world_size, hardware)
    ]
    show(table)
    own = [row for row in table if row["loss"] == "ours"][-1]
    print(
        f"in short: {own['gpus']} GPUs: loss {own['loss_ratio']} of the time and "
        f"{own['memory_ratio']} of the memory of open_clip's (simulated)"
    )
    note = (
        f"simulated: {hardware.flops / 1e12:g} Tflop/s at {hardware.mfu:.0%}, "
        f"{hardware.intra / 1e9:g} GB/s in a node of {hardware.gpus_per_node}, "
        f"{hardware.link / 1e9:g} GB/s between nodes; bf16, DDP, activation checkpointing"
    )
    write_csv(options.output, table, note)
    redraw(options.output)


if __name__ == "__main__":
    main()
