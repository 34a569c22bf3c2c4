from __future__ import annotations

import itertools

import pytest
import torch

from disco_ds.models import ModelConfig, create_clip
from disco_ds.optim import OptimConfig, learning_rate, parameter_groups


def test_warmup_then_cosine_to_the_minimum() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(config, step, 104, peak=1.0) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == pytest.approx(1.0)
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    half = [learning_rate(config, step, 104, peak=0.5) for step in range(105)]
    assert half == pytest.approx([rate / 2 for rate in rates])


def test_constant_and_no_warmup() -> None:
    config = OptimConfig(lr=2.0, schedule="constant", warmup_steps=0)
    assert {learning_rate(config, step, 10, peak=2.0) for step in range(20)} == {2.0}


def test_linear() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.2, schedule="linear", warmup_steps=0)
    rates = [learning_rate(config, step, 4, peak=1.0) for step in range(5)]
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "sgdm"])
def test_every_optimizer_learns_and_continues_exactly(name: str) -> None:
    """Moments and step count, LAMB's group-wise one included, survive a stop."""
    from tiny import random_pairs, tiny_encoders

    from disco_ds.distributed import World
    from disco_ds.grad_cache import contrastive_backward
    from disco_ds.losses import DiscoLoss
    from disco_ds.models import Temperature, TemperatureConfig
    from disco_ds.strategies.base import EngineState
    from disco_ds.strategies.single import SingleStrategy

    config = OptimConfig(name=name, lr=3e-3, warmup_steps=0)  # type: ignore[arg-type]
    temperature = Temperature(TemperatureConfig(learnable=False))
    values = []

    def steps(count: range, state: EngineState | None = None) -> EngineState:
        strategy = SingleStrategy(World(), precision="fp32")
        strategy.setup(tiny_encoders(seed=0 if state is None else 5), config)
        if state is not None:
            strategy.load_state(state)
        for _ in count:
            loss = DiscoLoss(normalize=True)
            pairs = random_pairs(8)
            values.append(
                contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=8)
            )
            strategy.step(3e-3)
        return strategy.state()

    whole = steps(range(8))
    assert values[-1] < values[0]
    resumed = steps(range(4), steps(range(4)))
    for name, value in whole.parameters.items():
        assert torch.equal(value, resumed.parameters[name]), name


def test_schedule_without_room_for_decay_ends_at_the_minimum() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=10)
    assert learning_rate(config, 9, 5, peak=1.0) == 1.0
    assert learning_rate(config, 12, 10, peak=1.0) == 0.0


def test_groups_are_open_clips() -> None:
    """The rule of open_clip_train: no decay for ndim < 2 or bn, ln, bias, logit_scale by name."""
    for name in ("disco-demo-vit", "disco-demo-rn"):
        encoders = create_clip(ModelConfig(name), seed=0).encoders
        groups = parameter_groups(encoders, OptimConfig(weight_decay=0.3))
        assert [group["weight_decay"] for group in groups] == [0.0, 0.3]
        plain = {
            id(p)
            for n, p in encoders.named_parameters()
            if p.ndim < 2 or any(word in n for word in ("bn", "ln", "bias", "logit_scale"))
        }
        assert {id(p) for p in groups[0]["params"]} == plain
        count = sum(len(group["params"]) for group in groups)
        assert count == len(list(encoders.parameters()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0}, "--optim.lr 0"),
        ({"min_lr": 1.0}, "--optim.min_lr 1"),
        ({"warmup_steps": -1}, "--optim.warmup_steps -1"),
        ({"max_grad_norm": 0}, "--optim.max_grad_norm 0"),
    ],
)
def test_nonsense_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**values)  # type: ignore[arg-type]
