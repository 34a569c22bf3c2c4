"""bf16 and fp16: as exact as one process in the same precision, and overflow changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from engines import build
from harness import run_distributed
from tiny import random_pairs, rows_of, tiny_encoders
from torch import Tensor

from disco_ds.distributed import World
from disco_ds.grad_cache import contrastive_backward
from disco_ds.losses import DiscoLoss
from disco_ds.models import Temperature, TemperatureConfig
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.config import Precision
from disco_ds.strategies.loss_scale import LossScale
from disco_ds.strategies.plain import LOW_PRECISION, PlainStrategy

AUTOCAST = {"torch_autocast": {"enabled": "auto"}}
PAIRS = 12
OPTIM = OptimConfig(lr=1e-3, warmup_steps=0)


def gradients(strategy: Strategy, dtype: torch.dtype = torch.float32) -> Tensor:
    """All encoder gradients (Adam's first moments after a step) as one vector; steps that
    overflow are repeated, on the main rank."""
    strategy.setup(tiny_encoders().to(dtype), OPTIM)
    world = strategy.world
    pairs = rows_of(random_pairs(PAIRS), world.rank, world.world_size)
    loss = DiscoLoss(process_group=strategy.process_group, normalize=True)
    temperature = Temperature(TemperatureConfig())
    skipped = True
    while skipped:
        contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=3)
        skipped = strategy.step(OPTIM.lr).skipped
    moments = strategy.state().moments
    strategy.close()
    names = sorted(name for name in moments if name.startswith("exp_avg/"))
    return torch.cat([moments[name].double().flatten() for name in names] or [torch.empty(0)])


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def zero_can(precision: Precision) -> bool:
    """DeepSpeed asks the processor for fp16 instructions; not every one has them."""
    from deepspeed.accelerator import get_accelerator

    return precision != "fp16" or bool(get_accelerator().is_fp16_supported())


def _errors(
    rank: int, world_size: int, exact: Tensor, precision: Precision, bounds: tuple[float, float]
) -> None:
    world = World(rank, world_size, rank)
    by_products, by_weights = bounds
    for name, json, bound in (
        ("ddp", None, by_products),
        ("fsdp2", None, by_weights),
        ("zero1", None, by_weights),
        ("zero2", None, by_weights),
        ("zero2_offload", None, by_weights),
        ("zero3", None, by_weights),
        # Its settings are global to the process: last.
        ("zero0", AUTOCAST, by_products),
        ("zero3", AUTOCAST, by_products),
    ):
        if json is AUTOCAST and precision == "fp16":
            continue  # refused
        if name.startswith("zero") and not zero_can(precision):
            continue  # refused as well: see test_zero_refuses_what_the_device_lacks
        strategy = build(name, world, pairs=PAIRS, precision=precision, json=json)
        found = gradients(strategy)
        if world.is_main:
            error = relative_error(found, exact)
            assert error <= bound, (name, json, error, bound)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_twice_the_error_of_one_process(precision: Precision) -> None:
    """Of one process with the same in 16 bits: products only (autocast), or weights as well."""
    exact = gradients(build("single", World(), pairs=PAIRS))
    by_products = gradients(build("single", World(), pairs=PAIRS, precision=precision))
    half = LOW_PRECISION[precision]
    by_weights = gradients(build("single", World(), pairs=PAIRS), half)
    errors = (relative_error(by_products, exact), relative_error(by_weights, exact))
    assert all(0 < error < 0.1 for error in errors)
    bounds = (2 * errors[0], 2 * errors[1])
    run_distributed(_errors, exact, precision, bounds, world_size=2, timeout=280)


def test_zero_refuses_what_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = build("zero2", World(), pairs=PAIRS, precision="fp16")
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
    with pytest.raises(ValueError, match=r"--precision fp16: .* use --precision bf16"):
        strategy.check_device()
    build("zero2", World(), pairs=PAIRS, precision="bf16").check_device()


def _overflow(rank: int, world_size: int) -> None:
    world = World(rank, world_size, rank)
    for name in ("ddp", "fsdp2"):
        strategy = build(name, world, pairs=PAIRS, precision="fp16")
        assert isinstance(strategy, PlainStrategy)
        _check_overflow(strategy)


def _check_overflow(strategy: PlainStrategy) -> None:
    """A gradient that overflows on one rank is a skipped step on all of them."""
    strategy.setup(tiny_encoders(), OPTIM)
    before = strategy.state()
    assert strategy.loss_scale is not None
    scale = strategy.loss_scale.value
    pairs = rows_of(random_pairs(PAIRS), strategy.world.rank, strategy.world.world_size)
    image, text = strategy.encode(pairs.image, pairs.text)
    assert image is not None and text is not None
    factor = math.inf if strategy.world.is_main else 1.0
    strategy.backward((image.float().sum() + text.float().sum()) * factor)
    result = strategy.step(1e-2)
    assert result.skipped and strategy.loss_scale.value == scale / 2
    after = strategy.state()
    assert after.optimizer_steps == 0 and not after.moments
    for key, value in before.parameters.items():
        assert torch.equal(value, after.parameters[key])


def test_an_overflow_anywhere_skips_the_step_everywhere() -> None:
    _check_overflow(build("single", World(), pairs=PAIRS, precision="fp16"))  # type: ignore[arg-type]
    run_distributed(_overflow, world_size=2)


def test_the_loss_scale_moves_and_ends() -> None:
    scale = LossScale(initial=4.0, growth_interval=2)
    for overflow, expected in ((True, 2), (False, 2), (False, 4), (False, 4), (True, 2), (True, 1)):
        scale.update(overflow=overflow)
        assert scale.value == expected
    with pytest.raises(ValueError, match="use --precision bf16"):
        scale.update(overflow=True)
