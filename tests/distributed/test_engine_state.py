"""A state saved under one engine continues exactly under any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from test_step import zero_strategy
from tiny import random_pairs, rows_of, tiny_encoders

from disco_ds.distributed import World
from disco_ds.grad_cache import contrastive_backward
from disco_ds.losses import DiscoLoss
from disco_ds.models import Temperature, TemperatureConfig
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import EngineState, Strategy
from disco_ds.strategies.single import SingleStrategy

OPTIM = OptimConfig(lr=1e-2, warmup_steps=0)


def steps(strategy: Strategy, numbers: range, *, load: EngineState | None = None) -> EngineState:
    strategy.setup(tiny_encoders(seed=3 if load else 0, resnet=True), OPTIM)
    strategy.module.train()
    if load is not None:
        strategy.load_state(load)
    world = strategy.world
    loss = DiscoLoss(process_group=strategy.process_group, normalize=True)
    temperature = Temperature(TemperatureConfig(learnable=False))
    for number in numbers:
        pairs = random_pairs(8, seed=number, image_size=32)
        pairs = rows_of(pairs, world.rank, world.world_size)
        contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=8)
        strategy.step(1e-2)
        strategy.average_buffers()  # as before every save: a resumed run starts from the mean
    state = strategy.state()
    strategy.close()
    return broadcast(state) if world.world_size > 1 else state


def broadcast(state: EngineState) -> EngineState:
    shared = [state]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def assert_same(found: EngineState, expected: EngineState, tolerance: float) -> None:
    assert found.optimizer_steps == expected.optimizer_steps
    for own, other in ((found.parameters, expected.parameters), (found.moments, expected.moments)):
        assert own.keys() == other.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=tolerance, msg=name)


def _stages(rank: int, world_size: int, precision: str) -> None:
    world = World(rank, world_size, rank)

    def zero(stage: int) -> Callable[[], Strategy]:
        return lambda: zero_strategy(world, stage, max_grad_norm=None, precision=precision)

    stages = (0, 1, 2, 3) if precision == "fp32" else (1, 2, 3)
    halfway = {stage: steps(zero(stage)(), range(2)) for stage in stages}
    for stage in stages:
        whole = steps(zero(stage)(), range(4))
        for saved_under in stages:
            resumed = steps(zero(stage)(), range(2, 4), load=halfway[saved_under])
            # The same stage repeats to the last bit; another one sums in another order.
            exact = saved_under == stage
            assert_same(resumed, whole, 0.0 if exact else (2e-3 if precision == "fp32" else 0.1))
        unchanged = steps(zero(stage)(), range(0), load=halfway[stage])
        assert_same(unchanged, halfway[stage], 0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_continue_each_other(precision: str) -> None:
    run_distributed(_stages, precision, world_size=2, timeout=280)


def test_single_process_continues_itself() -> None:
    def single() -> SingleStrategy:
        return SingleStrategy(World(), precision="fp32")

    whole = steps(single(), range(4))
    halfway = steps(single(), range(2))
    assert_same(steps(single(), range(2, 4), load=halfway), whole, 0.0)


def test_another_model_is_refused() -> None:
    strategy = SingleStrategy(World(), precision="fp32")
    state = steps(strategy, range(1))
    broken = EngineState({**state.parameters}, state.moments, 1)
    broken.parameters["clip.text_projection"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"clip\.text_projection is of shape \(3, 3\)"):
        steps(SingleStrategy(World(), precision="fp32"), range(1), load=broken)
