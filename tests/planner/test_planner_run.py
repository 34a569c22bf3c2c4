"""A run's prediction, and what is measured beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from disco_ds.comm_hooks import CommHookConfig
from disco_ds.distributed import World
from disco_ds.losses.disco import DiscoConfig
from disco_ds.models import ModelConfig, create_clip
from disco_ds.optim import OptimConfig
from disco_ds.planner.run import PeakMeasure, Prediction, measured_line, predict_run
from disco_ds.strategies.config import EngineConfig
from disco_ds.strategies.ddp import DDPStrategy
from disco_ds.strategies.single import SingleStrategy


def config(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "model": ModelConfig("disco-demo-vit"),
        "global_batch_size": 16,
        "micro_batch_size": None,
        "precision": "fp32",
        "loss": DiscoConfig(),
        "optim": OptimConfig(),
        "engine": EngineConfig(),
        "comm_hook": CommHookConfig(),
    }
    return SimpleNamespace(**(values | changes))


def predicted(world_size: int = 2, **changes: Any) -> Prediction:
    world = World(0, world_size)
    return predict_run(config(**changes), DDPStrategy(world, precision="fp32"), world)


def test_hooks_change_the_predicted_bytes() -> None:
    plain, hooked = (
        predicted(),
        predicted(comm_hook=CommHookConfig(name="openclip", compress="bf16")),
    )
    name = "comm/parameters/all_reduce_bytes"
    assert hooked.counted[name] * 2 == plain.counted[name]
    assert "comm/features/reduce_scatter_bytes" in hooked.counted
    assert "comm/features/reduce_scatter_bytes" not in plain.counted


def test_lines() -> None:
    plan = predicted()
    assert "planned" in plan.line() and "GiB" in plan.line()
    good = measured_line(plan, plan.peak, plan.counted)
    assert "+0.0%" in good and "as planned" in good
    other = measured_line(plan, plan.peak, {"comm/features/all_gather_bytes": 1.0})
    assert "planned" in other and "as planned" not in other


def test_counted_peak_of_a_real_run_is_near_the_plan() -> None:
    """Three steps on one CPU process, counted as the trainer counts them."""
    world, pairs = World(), 32
    settings = config(global_batch_size=pairs)
    measure = PeakMeasure(world.device).start()
    try:
        strategy = SingleStrategy(world, precision="fp32")
        parts = create_clip(settings.model, seed=0)
        strategy.setup(parts.encoders, settings.optim)
        loss = settings.loss.build(None, normalize=True)
        from disco_ds.grad_cache import Pairs, contrastive_backward
        from disco_ds.models import Temperature, TemperatureConfig

        temperature = Temperature(TemperatureConfig())
        image = torch.randn(pairs, 3, *parts.image_size)
        text = parts.tokenize(["a"] * pairs)
        batch = Pairs(image, text, torch.arange(pairs))
        for _ in range(PeakMeasure.COUNTED_STEP):
            between = torch.zeros(100_000_000)  # a save, between two steps: not of a step
            del between
            measure.step_begins()
            contrastive_backward(strategy, loss, temperature, batch, micro_batch_size=pairs)
            strategy.step(1e-4)
            measure.step_taken()
    finally:
        measure.stop()
    plan = predict_run(settings, strategy, world)
    assert abs(measure.peak() / plan.peak - 1) < 0.05, (measure.peak(), plan.memory.phases)


def test_a_run_too_short_to_count_a_step_measures_nothing() -> None:
    measure = PeakMeasure(torch.device("cpu")).start()
    for _ in range(PeakMeasure.COUNTED_STEP - 1):
        measure.step_begins()
        measure.step_taken()
    assert measure.peak() == 0.0
