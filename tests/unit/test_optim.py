from __future__ import annotations

import pytest

from disco_ds.models import ModelConfig, create_clip
from disco_ds.optim import OptimConfig, learning_rate, parameter_groups


def test_warmup_then_cosine_to_the_minimum() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4)
    rates = [learning_rate(config, step, 104, peak=1.0) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == pytest.approx(1.0)
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[3:], rates[4:], strict=False))
    half = [learning_rate(config, step, 104, peak=0.5) for step in range(105)]
    assert half == pytest.approx([rate / 2 for rate in rates])


def test_constant_and_no_warmup() -> None:
    config = OptimConfig(lr=2.0, schedule="constant", warmup_steps=0)
    assert {learning_rate(config, step, 10, peak=2.0) for step in range(20)} == {2.0}


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
