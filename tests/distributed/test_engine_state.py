"""A state saved under one engine continues exactly under any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from engines import build
from harness import run_distributed
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
            wanted = other[name]
            if tolerance and "in_proj_bias" in name:
                # A bias of the keys has no gradient but rounding, which Adam makes a full step of.
                value, wanted = (part.chunk(3)[::2] for part in (value, wanted))
            torch.testing.assert_close(value, wanted, rtol=0, atol=tolerance, msg=name)


def _continue_each_other(rank: int, world_size: int, names: list[str], precision: str) -> None:
    world = World(rank, world_size, rank)

    def strategy(name: str) -> Strategy:
        return build(name, world, pairs=8, precision=precision)  # type: ignore[arg-type]

    halfway = {name: steps(strategy(name), range(1)) for name in names}
    for before, name in zip([names[-1], *names], names, strict=False):
        whole = steps(strategy(name), range(3))
        # The same engine repeats to the last bit; another one sums in another order.
        assert_same(steps(strategy(name), range(1, 3), load=halfway[name]), whole, 0.0)
        moved = steps(strategy(name), range(0), load=halfway[before])
        assert_same(moved, halfway[before], 0.0)
        if precision == "fp32":
            assert_same(steps(strategy(name), range(1, 3), load=halfway[before]), whole, 2e-3)


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("fp32", ["ddp", "zero3", "fsdp2", "zero0", "zero2"]),
        ("bf16", ["zero1", "zero3", "fsdp2", "zero2"]),
    ],
)
def test_engines_continue_each_other(precision: str, names: list[str]) -> None:
    run_distributed(_continue_each_other, names, precision, world_size=2, timeout=280)


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
