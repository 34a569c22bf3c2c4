"""DisCo-CLIP's headline on a laptop: does it fit, and how far does it go. Simulated throughout.

    python tools/bench/plan_headline.py            # about two minutes, no GPU

Two kinds of rows. "trace": the real training step on fake tensors with a fake process group of that
many ranks; its peak of live tensors, next to the closed forms. "largest": the largest global batch
by closed forms for a card, in one forward with activation checkpointing (as DisCo-CLIP trains) and
in micro-batches of 256. Both add 5 % allocator slack and 0.75 GiB for CUDA and NCCL, which are
assumptions. Published numbers stand beside them; none of them was measured here.
"""

from __future__ import annotations

import argparse
import csv
import logging
from pathlib import Path
from typing import Any

from disco_ds.models import ModelConfig
from disco_ds.planner.cost import Hardware
from disco_ds.planner.plan import make_plan
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.solve import largest_batch
from disco_ds.planner.table import aligned
from disco_ds.planner.trace import trace
from disco_ds.planner.units import gib

RESULTS = Path(__file__).parent / "results"
HEADLINES = ((32_768, 8), (196_608, 64))
MODELS = ("ViT-B-32", "ViT-B-16", "ViT-L-14")
CARDS = {"40 GB": 40e9, "80 GB": 80e9}
MICRO_BATCH = 256
# DisCo-CLIP: arXiv 2304.08480, abstract. Inf-CL and the OpenCLIP local loss it is compared with:
# arXiv 2410.17243, 80 GB cards, AdamW, GradCache; its larger runs are on 32 GPUs.
PUBLISHED = {
    ("ViT-B-32", 8, "40 GB"): "DisCo-CLIP 32,768",
    ("ViT-B-32", 64, "40 GB"): "DisCo-CLIP 196,608",
    ("ViT-B-16", 8, "80 GB"): "Inf-CL 800k, OpenCLIP 172k",
    ("ViT-B-16", 64, "80 GB"): "Inf-CL 3456k, OpenCLIP 360k (32 GPUs)",
    ("ViT-L-14", 8, "80 GB"): "Inf-CL 448k, with data offload 4096k, OpenCLIP 152k",
    ("ViT-L-14", 64, "80 GB"): "Inf-CL 2048k, with data offload 12288k, OpenCLIP 352k (32 GPUs)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "plan_headline.csv")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [headline(batch, gpus) for batch, gpus in HEADLINES]
    for model in MODELS:
        for gpus in (8, 64):
            rows += [largest(model, gpus, card) for card in CARDS]
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(aligned([list(rows[0]), *([str(value) for value in row.values()] for row in rows)]))
    print(f"simulated, nothing measured; wrote {options.output}")
    fitting = [row["fits"] for row in rows[: len(HEADLINES)]]
    print(f"in short: published batches {[batch for batch, _ in HEADLINES]} fit: {fitting}")


def headline(batch: int, gpus: int) -> dict[str, Any]:
    """One headline: traced and by closed form, in one forward with checkpointing."""
    hardware = Hardware(memory=CARDS["40 GB"])
    request = _request("ViT-B-32", gpus, batch)
    traced = trace(request)
    closed = make_plan(request, hardware)
    needed = traced.step.peak.bytes * (1 + hardware.slack) + hardware.reserved
    same = closed.traffic == traced.step.traffic
    return _row(
        kind="trace of the real step",
        model="ViT-B-32",
        gpus=gpus,
        card="40 GB",
        one_forward=batch,
        traced_GiB=gib(traced.step.peak.bytes),
        closed_GiB=gib(closed.memory.peak),
        needed_GiB=gib(needed),
        fits=needed <= hardware.memory,
        traffic_as_planned=same,
        published=PUBLISHED["ViT-B-32", gpus, "40 GB"],
    )


def largest(model: str, gpus: int, card: str) -> dict[str, Any]:
    """The largest batches by closed forms."""
    hardware = Hardware(memory=CARDS[card])
    request = _request(model, gpus, gpus)
    whole = largest_batch(request, hardware)
    parts = largest_batch(request, hardware, micro_batch_size=MICRO_BATCH)
    return _row(
        kind="largest by closed forms",
        model=model,
        gpus=gpus,
        card=card,
        one_forward=whole.request.global_batch_size if whole else 0,
        micro_batches_of_256=parts.request.global_batch_size if parts else 0,
        closed_GiB=gib(parts.memory.peak) if parts else "",
        needed_GiB=gib(parts.needed) if parts else "",
        published=PUBLISHED.get((model, gpus, card), ""),
    )


def _request(model: str, gpus: int, batch: int) -> PlanRequest:
    return PlanRequest(
        ModelConfig(model, activation_checkpointing=True),
        global_batch_size=batch,
        world_size=gpus,
        precision="bf16",
        strategy="zero2",
    )


def _row(**values: Any) -> dict[str, Any]:
    names = (
        *("kind", "model", "gpus", "card", "one_forward", "micro_batches_of_256"),
        *("traced_GiB", "closed_GiB", "needed_GiB", "fits", "traffic_as_planned", "published"),
    )
    assert set(values) <= set(names)
    return {name: values.get(name, "") for name in names}


if __name__ == "__main__":
    main()
