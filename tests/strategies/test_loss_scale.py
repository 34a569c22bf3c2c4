"""The loss scale in a checkpoint: ours and DeepSpeed's continue alike, each from the other's."""

from __future__ import annotations

import types
from typing import Any

import pytest

from disco_ds.distributed import World
from disco_ds.strategies.loss_scale import LossScale
from disco_ds.strategies.zero import ZeroStrategy, import_deepspeed

WINDOW = 5
OVERFLOWS = [False] * 3 + [True] + [False] * 13 + [True, True] + [False] * 9


def deepspeeds(holder: str = "loss_scaler") -> Any:
    """A strategy around DeepSpeed's scaler; its fp16 engines need a GPU."""
    import_deepspeed(World())
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**10, WINDOW, 1.0, 1, False)
    strategy = ZeroStrategy.__new__(ZeroStrategy)
    optimizer = types.SimpleNamespace(**{holder: scaler})
    strategy.engine = types.SimpleNamespace(optimizer=optimizer)
    return strategy


@pytest.mark.parametrize("holder", ["loss_scaler", "loss_scale_config"])
@pytest.mark.parametrize("cut", [0, 2, 4, 9, 18, 20])
def test_deepspeeds_scale_continues(cut: int, holder: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    whole, first, second = (deepspeeds(holder) for _ in range(3))
    for overflow in OVERFLOWS:
        whole._loss_scaler.update_scale(overflow)
    for overflow in OVERFLOWS[:cut]:
        first._loss_scaler.update_scale(overflow)
    second._load_scale(first._scale_state())
    for overflow in OVERFLOWS[cut:]:
        second._loss_scaler.update_scale(overflow)
    assert second._scale_state() == whole._scale_state()


@pytest.mark.parametrize("cut", [0, 2, 4, 9, 18, 20])
def test_ours_continues(cut: int) -> None:
    whole, first, second = (LossScale(2.0**10, WINDOW) for _ in range(3))
    for overflow in OVERFLOWS:
        whole.update(overflow=overflow)
    for overflow in OVERFLOWS[:cut]:
        first.update(overflow=overflow)
    second.load_state(first.state())
    for overflow in OVERFLOWS[cut:]:
        second.update(overflow=overflow)
    assert second.state() == whole.state()


def test_a_scale_moves_between_engines() -> None:
    ours, theirs = LossScale(2.0**10, WINDOW), deepspeeds()
    ours.update(overflow=True)
    ours.update(overflow=False)
    theirs._load_scale(ours.state())
    assert theirs._scale_state() == ours.state() == {"value": 512.0, "good_steps": 1}


def test_engines_without_a_dynamic_scale_have_none() -> None:
    strategy = deepspeeds()
    strategy.engine.optimizer = types.SimpleNamespace(loss_scaler=types.SimpleNamespace())
    assert strategy._scale_state() is None
    strategy._load_scale({"value": 1.0, "good_steps": 0})
