"""What gradients in 16 bits do to training: loss curves and recall, side by side.

    python tools/bench/compression.py [--steps 200] [--seeds 0 1 2]

Two ranks train the demo's ViT on its data under DDP, with the same seeds, the parameter gradients
travelling in fp32, in bf16 with error feedback, and in bf16 without. The bytes and the time that
this saves on a thin link are in ``link.py``. Where two seeds in fp32 lie further apart than two
dtypes at the same seed, the dtype costs nothing that can be seen.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plots import keep_curves
from tables import environment, show, write_csv

from disco_ds.data.demo import ensure_demo
from disco_ds.metrics import read_metrics
from disco_ds.presets import DEMO_DATA

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
RECALL = "eval/retrieval/image_to_text_R@1"
LAST = 20
VARIANTS = {
    "fp32": (),
    "bf16, error feedback": ("--comm_hook.compress", "bf16"),
    "bf16": ("--comm_hook.compress", "bf16", "--comm_hook.error_feedback", "False"),
}


@dataclass(frozen=True)
class Curve:
    """Losses by step, and the recall at the end."""

    losses: list[float]
    recall: float

    @property
    def last(self) -> float:
        """Mean loss of the last steps."""
        return statistics.mean(self.losses[-LAST:])


def train(extra: tuple[str, ...], *, steps: int, seed: int) -> Curve:
    """One run of train.py on two ranks."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    with tempfile.TemporaryDirectory(prefix="bench-compression-") as folder:
        command = [
            *(torchrun, "--nproc_per_node", "2", "--master_port", "29532"),
            *(str(ROOT / "train.py"), "--preset", "demo", "--strategy", "ddp"),
            *("--model.name", "disco-demo-vit", "--steps", str(steps), "--seed", str(seed)),
            *("--log_every_steps", "1", "--evaluation.every_steps", "1000000", *extra),
            *("--checkpoint.every_steps", "1000000", "--run_dir", folder, "--device", "cpu"),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        lines = read_metrics(Path(folder))
    losses = [line["loss"] for line in lines if "loss" in line]
    return Curve(losses, next(line[RECALL] for line in reversed(lines) if RECALL in line))


def compare(found: dict[str, list[Curve]]) -> list[dict[str, Any]]:
    """One line per variant; differences are taken seed by seed."""
    base, rows = found["fp32"], []
    for name, curves in found.items():
        pairs = list(zip(curves, base, strict=True))
        rows.append(
            {
                "gradients": name,
                "seeds": len(curves),
                "last_loss": round(statistics.mean(curve.last for curve in curves), 4),
                "last_loss_sd": round(_sd([curve.last for curve in curves]), 4),
                "difference": round(statistics.mean(a.last - b.last for a, b in pairs), 4),
                "largest_of_a_step": round(max(_distance(a, b) for a, b in pairs), 4),
                "recall_at_1": round(100 * statistics.mean(curve.recall for curve in curves), 1),
                "recall_sd": round(100 * _sd([curve.recall for curve in curves]), 1),
            }
        )
    return rows


def _distance(one: Curve, other: Curve) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = LAST, [0]
    ensure_demo(DEMO_DATA)
    found: dict[str, list[Curve]] = {name: [] for name in VARIANTS}
    for seed in options.seeds:
        for name, extra in VARIANTS.items():
            found[name].append(train(extra, steps=options.steps, seed=seed))
    rows = compare(found)
    show(rows)
    if not options.quick:
        write(rows, found, options)
    feedback, plain = rows[1]["largest_of_a_step"], rows[2]["largest_of_a_step"]
    print(
        f"in short: bf16 gradients move the loss of a step by at most {feedback} (without error "
        f"feedback {plain}); {len(options.seeds)} seeds have a sd of {rows[0]['last_loss_sd']}"
    )


def write(
    rows: list[dict[str, Any]], found: dict[str, list[Curve]], options: argparse.Namespace
) -> None:
    """Table, curves and plot."""
    note = (
        f"disco-demo-vit, 2 x 64 pairs, {options.steps} steps, DDP, last {LAST} losses, "
        f"{environment()}"
    )
    write_csv(RESULTS / "compression.csv", rows, note)
    keep_curves(
        "compression", {name: [curve.losses for curve in own] for name, own in found.items()}
    )


if __name__ == "__main__":
    main()
