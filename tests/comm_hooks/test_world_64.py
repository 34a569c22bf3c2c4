"""64 ranks in one process, on DeepSpeed's engine and torch's fake process group.

Values mean nothing there; sizes and bytes are those of rank 0.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORLD_SIZE = 64
SCRIPT = f"""
import os, warnings
warnings.simplefilter("ignore")
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="{WORLD_SIZE}", LOCAL_RANK="0")
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size={WORLD_SIZE}, store=FakeStore())
from engines import build
from tiny import random_pairs, tiny_encoders
from disco_ds.comm_hooks import CountingHook, register_comm_hook
from disco_ds.distributed import World
from disco_ds.optim import OptimConfig

sizes = [p.numel() for p in tiny_encoders().parameters()]
for stage in (0, 1, 2, 3):
    strategy = build(f"zero{{stage}}", World(0, {WORLD_SIZE}, 0), pairs={WORLD_SIZE})
    strategy.setup(tiny_encoders(), OptimConfig(warmup_steps=0))
    hook = CountingHook()
    register_comm_hook(strategy.hookable, hook)
    pairs = random_pairs(1)
    with strategy.accumulate(), strategy.micro_batch(is_last=True):
        image, text = strategy.encode(pairs.image, pairs.text)
        strategy.backward(image.sum() + text.sum())
    strategy.step(1e-3)
    states = strategy._torch_optimizer.state.values()
    own = sum(state["exp_avg"].numel() for state in states)
    found = hook.metrics()
    padded = sum(-(-size // {WORLD_SIZE}) for size in sizes) * {WORLD_SIZE}
    expected = 4 * (padded if stage == 3 else sum(sizes))
    kind = "reduce_scatter" if stage == 3 else "all_reduce"
    assert found[f"comm/parameters/{{kind}}_bytes"] == expected, (stage, found, expected)
    if stage == 0:
        assert own == sum(sizes)
    elif stage == 3:
        assert own == padded // {WORLD_SIZE}
    else:  # two flat groups, each padded to whole and aligned parts
        assert sum(sizes) <= own * {WORLD_SIZE} <= sum(sizes) + 2 * 4 * {WORLD_SIZE}, (stage, own)
    strategy.close()
print("all stages")
"""


def test_sizes_and_bytes_of_one_rank_in_64() -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tests,
        env={"PYTHONPATH": f"{tests}:{tests.parent}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "all stages" in done.stdout, done.stderr[-3000:]
