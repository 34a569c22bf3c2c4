"""BatchNorm over all ranks is BatchNorm of one process; frozen, it does not move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import build
from harness import run_distributed
from tiny import random_pairs, rows_of, tiny_encoders
from torch import Tensor

from disco_ds.batch_norm import BatchNormMode, use_batch_norm_
from disco_ds.distributed import World
from disco_ds.grad_cache import contrastive_backward
from disco_ds.losses import DiscoLoss
from disco_ds.models import ModelConfig, Temperature, TemperatureConfig, create_clip
from disco_ds.optim import OptimConfig

PAIRS = 12
OPTIM = OptimConfig(lr=1e-3, warmup_steps=0)


def one_step(name: str, world: World, mode: BatchNormMode, *, double: bool) -> dict[str, Tensor]:
    """Moments (gradients) and running statistics after one step."""
    dtype = torch.float64 if double else torch.float32
    pairs = rows_of(random_pairs(PAIRS, image_size=32, dtype=dtype), world.rank, world.world_size)
    encoders = tiny_encoders(resnet=True).to(dtype)
    use_batch_norm_(encoders, mode)
    strategy = build(name, world, pairs=PAIRS)
    strategy.setup(encoders, OPTIM)
    loss = DiscoLoss(process_group=strategy.process_group, normalize=True)
    temperature = Temperature(TemperatureConfig()).to(dtype)
    contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=PAIRS)
    strategy.step(OPTIM.lr)
    strategy.average_buffers()
    state = strategy.state()
    found = {**state.moments, **{n: t for n, t in state.parameters.items() if "running" in n}}
    strategy.close()
    return found


def _compare(rank: int, world_size: int, file: str) -> None:
    expected = torch.load(file)
    world = World(rank, world_size, rank)
    for name in ("ddp", "fsdp2", "zero2"):
        double = name != "zero2"
        found = one_step(name, world, "synced", double=double)
        if rank:
            continue
        for key, value in expected.items():
            # Rounding of sums over 12 pairs; ZeRO has no fp64.
            atol = 1e-12 if double else 1e-5
            error = float((found[key].double() - value).abs().max())
            scale = max(1.0, float(value.abs().max()))
            assert error <= atol * scale, (name, key, error, scale)


@pytest.mark.parametrize("world_size", [2, 3])
def test_synced_equals_one_process(tmp_path: Path, world_size: int) -> None:
    expected = one_step("single", World(), "local", double=True)
    torch.save(expected, tmp_path / "expected.pt")
    run_distributed(_compare, str(tmp_path / "expected.pt"), world_size=world_size)


def test_frozen_statistics_stay() -> None:
    config = ModelConfig("disco-demo-rn", batch_norm="frozen")
    encoders = create_clip(config, seed=0).encoders
    before = {n: b.clone() for n, b in encoders.named_buffers()}
    encoders.train()
    image = torch.randn(3, 3, 64, 64)
    features, _ = encoders(image, None)
    features.sum().backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in encoders.named_buffers())
    assert encoders.clip.visual.bn1.weight.grad is not None
    encoders.eval()
    assert torch.equal(encoders(image, None)[0], features)
