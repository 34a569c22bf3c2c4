"""The two-pass step: micro-batches of any sizes on any ranks are one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import build
from harness import run_distributed
from tiny import random_pairs, rows_of, tiny_encoders
from torch import Tensor

from disco_ds.distributed import World, mean_over_ranks_
from disco_ds.grad_cache import Pairs, RandomState, contrastive_backward, micro_batch_sizes
from disco_ds.losses import DiscoLoss
from disco_ds.models import Temperature, TemperatureConfig
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import Strategy

OPTIM = OptimConfig(lr=1e-3, warmup_steps=0)
PAIRS = 12


def gradients(
    strategy: Strategy,
    pairs: Pairs,
    micro_batch_size: int,
    *,
    patch_dropout: float = 0.0,
    equal_ranks: bool = False,
) -> dict[str, Tensor]:
    """Encoder gradients (as Adam's first moments) and the temperature's, of one step."""
    strategy.setup(tiny_encoders(patch_dropout=patch_dropout).double(), OPTIM)
    temperature = Temperature(TemperatureConfig()).double()
    loss = DiscoLoss(process_group=strategy.process_group, normalize=True)
    contrastive_backward(
        strategy,
        loss,
        temperature,
        pairs,
        micro_batch_size=micro_batch_size,
        equal_ranks=equal_ranks,
    )
    scale_gradient = temperature.logit_scale.grad
    mean_over_ranks_([scale_gradient], strategy.world)
    strategy.step(OPTIM.lr)
    return {**strategy.state().moments, "logit_scale": scale_gradient}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 5, 7, 11])
def test_micro_batches_equal_one_batch(micro_batch_size: int) -> None:
    """5, 7 and 11 leave a smaller last micro-batch."""
    pairs = random_pairs(PAIRS, dtype=torch.float64)
    expected = gradients(build("single", World(), pairs=PAIRS), pairs, PAIRS)
    assert_close(
        gradients(build("single", World(), pairs=PAIRS), pairs, micro_batch_size), expected
    )


def test_a_step_that_cannot_be_taken_says_so() -> None:
    pairs = random_pairs(PAIRS)
    loss, temperature = DiscoLoss(normalize=True), Temperature(TemperatureConfig())
    strategy = build("single", World(), pairs=PAIRS)
    strategy.setup(tiny_encoders(), OPTIM)
    with pytest.raises(ValueError, match="micro_batch_size 0: must be at least 1"):
        contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=0)
    strategy.module.requires_grad_(False)
    for size in (PAIRS, 4):
        with pytest.raises(ValueError, match="both towers are locked"):
            contrastive_backward(strategy, loss, temperature, pairs, micro_batch_size=size)


def test_the_second_pass_repeats_the_first_ones_dropout() -> None:
    """Or gradients would belong to other features; and the random stream goes on as it was."""
    pairs = random_pairs(PAIRS, dtype=torch.float64)
    features: list[Tensor] = []

    class Recording(type(build("single", World(), pairs=PAIRS))):  # type: ignore[misc]
        def encode(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            found = super().encode(image, text)
            features.append(found[0].detach())
            return found

    torch.manual_seed(0)
    strategy = Recording(World(), precision="fp32")
    gradients(strategy, pairs, 4, patch_dropout=0.5)
    after = RandomState.capture(torch.device("cpu")).cpu
    assert len(features) == 6
    for first, second in zip(features[:3], features[3:], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(features[0], features[1])
    torch.manual_seed(0)
    with torch.no_grad():
        strategy.encode(pairs.image[:4], pairs.text[:4])
        strategy.encode(pairs.image[4:8], pairs.text[4:8])
        strategy.encode(pairs.image[8:], pairs.text[8:])
    assert torch.equal(RandomState.capture(torch.device("cpu")).cpu, after)


def _uneven(rank: int, world_size: int, expected: dict[str, Tensor]) -> None:
    """Rank 0 has 3 pairs, rank 1 has 9: three micro-batches each."""
    world = World(rank, world_size, rank)
    pairs = random_pairs(PAIRS, dtype=torch.float64)
    own = (0, 3) if rank == 0 else (3, PAIRS)
    pairs = Pairs(*(column[slice(*own)] for column in (pairs.image, pairs.text, pairs.index)))
    assert micro_batch_sizes(len(pairs.index), 3, world) == ([1, 1, 1] if rank == 0 else [3, 3, 3])
    for name in ("ddp", "fsdp2"):
        found = gradients(build(name, world, pairs=PAIRS), pairs, 3)
        if world.is_main:
            assert_close(found, expected)
    with pytest.raises(ValueError, match="9 micro-batches on one rank, but only 3 pairs"):
        micro_batch_sizes(len(pairs.index), 1, world)


def test_ranks_may_hold_different_numbers_of_pairs() -> None:
    pairs = random_pairs(PAIRS, dtype=torch.float64)
    expected = gradients(build("single", World(), pairs=PAIRS), pairs, PAIRS)
    run_distributed(_uneven, expected, world_size=2)


def _equal(rank: int, world_size: int, expected: dict[str, Tensor]) -> None:
    world = World(rank, world_size, rank)
    pairs = rows_of(random_pairs(PAIRS, dtype=torch.float64), rank, world_size)
    maxima = []
    all_reduce = dist.all_reduce

    def watched(tensor: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, **settings: Any) -> Any:
        maxima.extend([op] * (op == dist.ReduceOp.MAX))
        return all_reduce(tensor, op, **settings)

    for equal_ranks, expected_maxima in ((False, 1), (True, 0)):
        strategy = build("fsdp2", world, pairs=PAIRS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", watched)
            found = gradients(strategy, pairs, 4, equal_ranks=equal_ranks)
        assert len(maxima) == expected_maxima
        maxima.clear()
        if world.is_main:
            assert_close(found, expected)


def test_equal_ranks_need_not_agree_on_their_micro_batches() -> None:
    pairs = random_pairs(PAIRS, dtype=torch.float64)
    expected = gradients(build("single", World(), pairs=PAIRS), pairs, PAIRS)
    run_distributed(_equal, expected, world_size=2)


@pytest.mark.parametrize(
    ("pairs", "size", "expected"),
    [(12, 4, [4, 4, 4]), (12, 5, [5, 5, 2]), (3, 5, [3]), (5, 5, [5])],
)
def test_full_micro_batches_and_a_rest(pairs: int, size: int, expected: list[int]) -> None:
    assert micro_batch_sizes(pairs, size, World()) == expected


def _encode_between(rank: int, world_size: int) -> None:
    """Encoding for an evaluation, one tower at a time, leaves the training step as it was."""
    world = World(rank, world_size, rank)
    pairs = random_pairs(PAIRS, seed=5)
    features = tiny_encoders().eval()(pairs.image, pairs.text)
    for name in ("ddp", "fsdp2", "zero0", "zero2", "zero3"):
        states = []
        for evaluate in (False, True):
            strategy = build(name, world, pairs=PAIRS)
            strategy.setup(tiny_encoders(), OPTIM)
            if evaluate:
                _check_features(strategy, pairs, features)
            step(strategy, world)
            if evaluate:
                with strategy.evaluating():
                    strategy.encode(None, pairs.text[: 1 + rank])
            step(strategy, world)
            states.append(strategy.state())
            strategy.close()
        for key, value in states[0].parameters.items():
            assert torch.equal(value, states[1].parameters[key]), (name, key)


def _check_features(
    strategy: Strategy, pairs: Pairs, expected: tuple[Tensor | None, Tensor | None]
) -> None:
    with strategy.evaluating():
        image, nothing = strategy.encode(pairs.image, None)
        assert nothing is None
        _, text = strategy.encode(None, pairs.text)
        both = strategy.encode(pairs.image, pairs.text)
    for found in ((image, text), both):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert strategy.module.training


def step(strategy: Strategy, world: World) -> None:
    pairs = rows_of(random_pairs(PAIRS), world.rank, world.world_size)
    loss = DiscoLoss(process_group=strategy.process_group, normalize=True)
    contrastive_backward(
        strategy, loss, Temperature(TemperatureConfig()), pairs, micro_batch_size=3
    )
    strategy.step(OPTIM.lr)


def test_encoding_at_any_time_disturbs_nothing() -> None:
    run_distributed(_encode_between, world_size=2)
