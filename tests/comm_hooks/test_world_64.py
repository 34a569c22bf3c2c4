"""64 ranks in one process, on DeepSpeed's engine and torch's fake process group.

Values mean nothing there; sizes and bytes are those of rank 0, as the planner says.
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
from engines import build, zero_json
from disco_ds.comm_hooks import CountingHook, register_comm_hook
from disco_ds.distributed import World
from disco_ds.models import ModelConfig, create_clip
from disco_ds.optim import OptimConfig
from disco_ds.planner.engine_memory import engine_memory
from disco_ds.planner.plan import profile_of
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.run import counted_metrics
from disco_ds.planner.comm import step_traffic

model = ModelConfig("disco-demo-vit")
for stage in (0, 1, 2, 3):
    name = f"zero{{stage}}"
    request = PlanRequest(
        model,
        {WORLD_SIZE},
        {WORLD_SIZE},
        precision="fp32",
        strategy=name,
        ds_config=zero_json(name),
    )
    profile = profile_of(request, like_cuda=False)
    planned = counted_metrics(step_traffic(request, profile))
    rest = engine_memory(request, profile, like_cuda=False).at_rest

    parts = create_clip(model, seed=0)
    strategy = build(name, World(0, {WORLD_SIZE}, 0), pairs={WORLD_SIZE})
    strategy.setup(parts.encoders, OptimConfig(warmup_steps=0))
    hook = CountingHook()
    register_comm_hook(strategy.hookable, hook)
    with strategy.accumulate(), strategy.micro_batch(is_last=True):
        image = torch.zeros(1, 3, *parts.image_size)
        features = strategy.encode(image, parts.tokenize(["a"]))
        strategy.backward(features[0].sum() + features[1].sum())
    strategy.step(1e-3)
    states = strategy._torch_optimizer.state.values()
    own = 4 * sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in states)
    assert own == rest["optimizer"], (stage, own, rest)
    kind = "reduce_scatter" if stage == 3 else "all_reduce"
    key = f"comm/parameters/{{kind}}_bytes"
    assert hook.metrics()[key] == planned[key], (stage, hook.metrics(), planned)
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
