"""BatchNorm over all ranks is BatchNorm of one process; frozen, it does not move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import build
from harness import run_distributed
from timm.layers import BatchNormAct2d
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


@pytest.mark.parametrize("micro_batch_size", [2, 4, 8])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_count_each_micro_batch_once(
    momentum: float | None, micro_batch_size: int
) -> None:
    encoders = tiny_encoders(resnet=True)
    use_batch_norm_(encoders, "local")
    norms = [m for m in encoders.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = momentum
    pairs = random_pairs(8, image_size=32)
    strategy = build("single", World(), pairs=8)
    strategy.setup(encoders, OPTIM)
    means = []
    norms[0].register_forward_pre_hook(lambda _, inputs: means.append(inputs[0].mean((0, 2, 3))))
    loss, temperature = DiscoLoss(normalize=True), Temperature(TemperatureConfig())
    contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=micro_batch_size)
    count = 8 // micro_batch_size
    assert {int(norm.num_batches_tracked) for norm in norms} == {count}
    if momentum is None:  # the mean over micro-batches, as torch's own
        expected = torch.stack(means[-count:]).mean(0)
        torch.testing.assert_close(norms[0].running_mean, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_any_batch_norm_gives_what_torch_gives(
    options: dict[str, bool], momentum: float | None
) -> None:
    theirs, ours = (torch.nn.BatchNorm2d(3, momentum=momentum, **options) for _ in range(2))
    use_batch_norm_(ours, "local")
    for step in range(3):
        values = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        assert torch.equal(ours(values), theirs(values))
    assert torch.equal(ours.eval()(values), theirs.eval()(values))


def timm_layer() -> BatchNormAct2d:
    torch.manual_seed(0)
    layer = BatchNormAct2d(3, act_layer=torch.nn.GELU)
    torch.nn.init.normal_(layer.weight)
    return layer


def test_timms_layer_with_an_activation() -> None:
    """The image towers of MobileCLIP and other timm models."""
    theirs, ours = timm_layer(), timm_layer()
    use_batch_norm_(ours, "local")
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for step in range(3):
        values = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        assert torch.equal(ours(values), theirs(values))
    assert torch.equal(ours.eval()(values), theirs.eval()(values))
    use_batch_norm_(ours.train(), "frozen")
    before = ours.running_mean.clone()
    ours(values)
    assert torch.equal(ours.running_mean, before)
    # In a locked tower too.
    locked = timm_layer().requires_grad_(False)
    use_batch_norm_(locked, "local")
    locked.train()(values)
    assert not locked.running_mean.any()


def test_a_kind_of_batch_norm_that_cannot_follow_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    use_batch_norm_(model, "local")
    for mode in ("synced", "frozen"):
        with pytest.raises(ValueError, match=f"batch_norm {mode}: 0 is a BatchNorm1d"):
            use_batch_norm_(model, mode)


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
