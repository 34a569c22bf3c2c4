"""Losses and whole training steps over a thin link: time, and bytes on the wire as predicted.

    sudo python tools/bench/link.py [--ranks 2 4] [--rate 1gbit] [--rounds 15]

``tools/shaped_net.sh`` puts every rank into a network namespace of its own behind a link of limited
speed. In one group of processes all variants take turns; bytes are what the kernel counted on the
rank's interface, less 66 for each packet, the prediction is the planner's, with gloo's way to
reduce and scatter (an all-reduce). Two experiments:

* loss: forward and backward of the loss alone, for growing batches (d = 512). Gradients are
  compared with float64 first.
* whole: a training step of a small CLIP under DDP, with gradients in fp32, or in bf16 with error
  feedback.

A CPU is slower than its link would like: the smaller the batch, the more the link decides. The
floor is bytes over rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from losses_baselines import PROVIDERS
from losses_measure import Setup, forget, make_step, parity
from plots import redraw
from tables import environment, show, write_csv

from disco_ds.comm_hooks import CompressedReduction, register_comm_hook
from disco_ds.distributed import World, mean_over_ranks_
from disco_ds.grad_cache import Pairs, contrastive_backward
from disco_ds.losses.disco import DiscoConfig, DiscoLoss
from disco_ds.models import ModelConfig, Temperature, TemperatureConfig, create_clip
from disco_ds.optim import OptimConfig
from disco_ds.planner.comm import Account, loss_traffic, step_traffic
from disco_ds.planner.cost import wire_bytes
from disco_ds.planner.meter import Traffic
from disco_ds.planner.plan import profile_of
from disco_ds.planner.request import PlanRequest
from disco_ds.preemption import Requests
from disco_ds.strategies.ddp import DDPStrategy

ROOT = Path(__file__).resolve().parents[2]
NET = ROOT / "tools" / "shaped_net.sh"
RESULTS = Path(__file__).parent / "results"
COUNTERS = Path("/sys/class/net/uplink/statistics")
# Ethernet, IPv4 and TCP with a time stamp: not payload, in front of each packet.
PACKET_HEADERS = 14 + 20 + 32
OURS = {
    "ours": DiscoConfig(),
    "ours_bf16": DiscoConfig(wire_dtype="bf16"),
    "ours_reduce_scatter": DiscoConfig(gradient_reduction="reduce_scatter"),
    "ours_all_reduce": DiscoConfig(gradient_reduction="all_reduce"),
    "ours_ring": DiscoConfig(gather="ring"),
}
LOSSES = ("open_clip", "disco_clip", *OURS)
SCALE, DIM = 1 / 0.07, 512
WHOLE_MODEL = "disco-demo-vit"
Step = Callable[[], None]


def predicted_bytes(experiment: str, variant: str, ranks: int, pairs: int) -> float | None:
    """What a rank receives in one step, by the planner; open_clip's loss by its code."""
    batch = ranks * pairs
    if experiment == "whole":
        return _predicted_whole(variant, ranks, batch)
    if variant == "open_clip":  # two gathers, two reduce-scatters of fp32 features
        return 4 * 4 * batch * DIM * (ranks - 1) / ranks
    if variant not in OURS:
        return None
    model = ModelConfig("ViT-B-32")
    request = PlanRequest(model, batch, ranks, precision="fp32", loss=OURS[variant])
    account = Account()
    loss_traffic(account, request, DIM)
    return sum(wire_bytes(_by_gloo(entry), ranks) for entry in account.traffic())


def _predicted_whole(variant: str, ranks: int, batch: int) -> float | None:
    if variant == "open_clip":
        return None
    loss = OURS["ours" if variant == "ours" else "ours_bf16"]
    model = ModelConfig(WHOLE_MODEL)
    request = PlanRequest(model, batch, ranks, precision="fp32", strategy="ddp", loss=loss)
    entries = step_traffic(request, profile_of(request, like_cuda=False))
    compressed = variant.endswith("compressed")
    return sum(
        wire_bytes(entry, ranks) * (0.5 if compressed and entry.phase == "backward" else 1.0)
        for entry in map(_by_gloo, entries)
    )


def _by_gloo(entry: Traffic) -> Traffic:
    """Gloo scatters by an all-reduce."""
    if entry.collective == "reduce_scatter":
        return replace(entry, collective="all_reduce")
    return entry


# In a rank.


def measure(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds and received bytes of every variant, in turn."""
    found: dict[str, dict[str, list[float]]] = {n: {"ms": [], "bytes": []} for n in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            time.sleep(0.02)  # let acknowledgements and the bucket of the shaper settle
            received, begin = received_payload(), time.perf_counter()
            step()
            elapsed = time.perf_counter() - begin
            time.sleep(0.02)
            if number:  # the first round opens connections
                found[name]["ms"].append(1e3 * elapsed)
                found[name]["bytes"].append(received_payload() - received)
    return found


def received_payload() -> int:
    """Bytes that this rank's interface has taken in, without the headers of packets."""
    total, packets = (int((COUNTERS / name).read_text()) for name in ("rx_bytes", "rx_packets"))
    return total - PACKET_HEADERS * packets


def loss_steps(rank: int, ranks: int, pairs: int) -> dict[str, Step]:
    """One step of each loss, after its gradients were checked."""
    setup = Setup(ranks=ranks, pairs=pairs, dim=DIM, scale=SCALE)
    steps: dict[str, Step] = {}
    for name in LOSSES:
        provider = PROVIDERS[name]
        loss = provider.make(rank, ranks)
        error = parity(provider, loss, setup, rank)["gradient_error"]
        if error > 1e-3:  # fp32 where terms cancel
            raise AssertionError(f"{name}: gradients are off by {error:.1e}")
        run, leaves = make_step(loss, setup, pairs, rank)

        def step(run: Step = run, leaves: list[Any] = leaves) -> None:
            run()
            forget(leaves)

        steps[name] = step
    return steps


def whole_steps(rank: int, ranks: int, pairs: int) -> dict[str, Step]:
    """A training step with open_clip's loss and ours, gradients in fp32 and in 16 bits."""
    world = World(rank, ranks, rank)
    losses = {
        "open_clip": (PROVIDERS["open_clip"].make(rank, ranks), False),
        "ours": (DiscoLoss(), False),
        "ours_bf16": (DiscoLoss(wire_dtype=torch.bfloat16), False),
        "ours_bf16_compressed": (DiscoLoss(wire_dtype=torch.bfloat16), True),
    }
    return {
        name: _whole_step(world, pairs, loss, compress=compress)
        for name, (loss, compress) in losses.items()
    }


def _whole_step(world: World, pairs: int, loss: Any, *, compress: bool) -> Step:
    parts = create_clip(ModelConfig(WHOLE_MODEL), seed=0)
    strategy = DDPStrategy(world, precision="fp32")
    strategy.setup(parts.encoders, OptimConfig())
    if compress:
        register_comm_hook(strategy.hookable, CompressedReduction(torch.bfloat16))
    temperature = Temperature(TemperatureConfig())
    generator = torch.Generator().manual_seed(world.rank)
    image = torch.randn(pairs, 3, *parts.image_size, generator=generator)
    text = torch.randint(1, 99, (pairs, 12), generator=generator)
    batch = Pairs(image, text, torch.arange(pairs) + world.rank * pairs)

    def normalised(x: Any, y: Any, scale: Any, *args: Any, **kwargs: Any) -> Any:
        unit = torch.nn.functional.normalize
        return loss(unit(x, dim=1), unit(y, dim=1), scale)

    def step() -> None:
        contrastive_backward(
            strategy,
            normalised,  # type: ignore[arg-type]
            temperature,
            batch,
            micro_batch_size=pairs,
            equal_ranks=True,
        )
        own = [p.grad for p in (temperature.logit_scale,) if p.grad is not None]
        mean_over_ranks_([*own, torch.zeros(len(Requests._fields))], world)
        strategy.step(1e-4)
        temperature.logit_scale.grad = None

    return step


def worker(rank: int, ranks: int, experiment: str, pairs: int, rounds: int, out: Path) -> None:
    """Run in a namespace: meet the others, measure, leave the numbers in a file."""
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="uplink", MASTER_ADDR="10.88.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    make = loss_steps if experiment == "loss" else whole_steps
    found = measure(make(rank, ranks, pairs), rounds)
    out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# Outside.


def run_ranks(ranks: int, experiment: str, pairs: int, rounds: int) -> list[dict[str, Any]]:
    """All ranks of one experiment, each in its namespace."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / str(rank) for rank in range(ranks)]
        command = [sys.executable, __file__, "--worker"]
        numbers = [str(ranks), experiment, str(pairs), str(rounds)]
        processes = [
            subprocess.Popen(
                [NET, "exec", str(rank), *command, str(rank), *numbers, str(outs[rank])]
            )
            for rank in range(ranks)
        ]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            raise SystemExit(f"{experiment}, {ranks} ranks, {pairs} pairs failed")
        return [json.loads(out.read_text()) for out in outs]


def rows_of(experiment: str, ranks: int, pairs: int, rate: float, found: list[Any]) -> list[Any]:
    """One line per variant: slowest rank's time of each round, bytes of the busiest rank."""
    table, base = [], None
    for name in found[0]:
        times = [max(values) for values in zip(*(rank[name]["ms"] for rank in found), strict=True)]
        base = base or times
        ratios = [own / other for own, other in zip(times, base, strict=True)]
        received = max(statistics.median(rank[name]["bytes"]) for rank in found)
        expected = predicted_bytes(experiment, name, ranks, pairs)
        quantiles = statistics.quantiles(times, n=5)
        table.append(
            {
                "experiment": experiment,
                "variant": name,
                "ranks": ranks,
                "pairs_per_rank": pairs,
                "ms_median": round(statistics.median(times), 2),
                "ms_p20": round(quantiles[0], 2),
                "ms_p80": round(quantiles[-1], 2),
                "ratio": round(statistics.median(ratios), 3),
                "received_kb": round(received / 1e3, 1),
                "predicted_kb": round(expected / 1e3, 1) if expected else "",
                "received_over_predicted": round(received / expected, 4) if expected else "",
                "link_floor_ms": round(1e3 * 8 * received / rate, 2),
            }
        )
    return table


def bits_per_second(rate: str) -> float:
    """1gbit, 100mbit."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise SystemExit(f"--rate {rate}: give it as 1gbit or 100mbit")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        rank, ranks, experiment, pairs, rounds, out = sys.argv[2:]
        worker(int(rank), int(ranks), experiment, int(pairs), int(rounds), Path(out))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--whole_pairs", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="1ms")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "link.csv")
    parser.add_argument("--quick", action="store_true", help="2 ranks, one size")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.pairs, options.whole_pairs, options.rounds = [2], [256], [16], 3
    table: list[dict[str, Any]] = []
    note = ""
    for ranks in options.ranks:
        arguments = ["--ranks", str(ranks), "--rate", options.rate, "--delay", options.delay]
        up = subprocess.run([NET, "up", *arguments], check=True, text=True, capture_output=True)
        note = up.stdout.strip()
        try:
            for experiment, sizes in (("loss", options.pairs), ("whole", options.whole_pairs)):
                for pairs in sizes:
                    found = run_ranks(ranks, experiment, pairs, options.rounds)
                    rate = bits_per_second(options.rate)
                    table += rows_of(experiment, ranks, pairs, rate, found)
        finally:
            subprocess.run([NET, "down"], check=True)
    show(table)
    largest = [r for r in table if r["experiment"] == "loss" and r["variant"] == "ours_bf16"][-1]
    print(
        f"in short: {largest['ranks']} x {largest['pairs_per_rank']} pairs, bf16 on the wire: "
        f"{largest['ratio']} of the time of open_clip's loss, bytes "
        f"{largest['received_over_predicted']} of those predicted"
    )
    if not options.quick:
        link = note.partition(", ")[2]
        settings = f"link {link}, gloo, {options.rounds} rounds in turn, {environment()}"
        write_csv(options.output, table, settings)
        redraw(options.output)


if __name__ == "__main__":
    main()
