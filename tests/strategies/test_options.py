"""Locked towers, shared weights, BatchNorm, saving memory: none of it changes the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines import build
from harness import run_distributed
from tiny import random_pairs, rows_of, tiny_encoders
from torch import Tensor, nn

from disco_ds.blocks import checkpoint_blocks_, compile_blocks_, transformer_blocks
from disco_ds.distributed import World
from disco_ds.grad_cache import Engine, contrastive_backward
from disco_ds.losses import DiscoLoss
from disco_ds.models import Encoders, ModelConfig, Temperature, TemperatureConfig, create_clip
from disco_ds.optim import OptimConfig
from disco_ds.strategies.adopt import AdoptedModel
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.config import EngineConfig

PAIRS = 12
OPTIM = OptimConfig(lr=1e-3, warmup_steps=0, eps=1e-3)
EACH = EngineConfig(reduce_every_micro_batch=True)
FRUGAL = EngineConfig(cpu_offload=True)
GREEDY = EngineConfig(reshard_after_forward=False)


def lock_image(encoders: Encoders) -> None:
    encoders.clip.visual.requires_grad_(False)


def lock_text_and_checkpoint(encoders: Encoders) -> None:
    for name, parameter in encoders.named_parameters():
        parameter.requires_grad_(".visual." in name)
    checkpoint_blocks_(transformer_blocks(encoders))


def every_second_block(encoders: Encoders) -> None:
    assert checkpoint_blocks_(transformer_blocks(encoders), every=2) == 2


def share_weights(encoders: Encoders) -> None:
    clip = encoders.clip
    clip.text_projection = clip.visual.proj


CHANGES: list[Callable[[Encoders], None]] = [
    lock_image,
    lock_text_and_checkpoint,
    every_second_block,
    share_weights,
]


def backward(engine: Engine, loss: nn.Module) -> None:
    world = engine.world
    pairs = rows_of(random_pairs(PAIRS), world.rank, world.world_size)
    contrastive_backward(engine, loss, Temperature(TemperatureConfig()), pairs, micro_batch_size=4)


def moments(
    strategy: Strategy, change: Callable[[Encoders], None] | None = None
) -> dict[str, Tensor]:
    """Adam's moments after two steps."""
    encoders = tiny_encoders()
    if change is not None:
        change(encoders)
    strategy.setup(encoders, OPTIM)
    for _ in range(2):
        backward(strategy, DiscoLoss(process_group=strategy.process_group, normalize=True))
        strategy.step(OPTIM.lr)
    found = strategy.state().moments
    strategy.close()
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        bound = 1e-5 * max(1.0, float(value.abs().max()))
        assert float((found[name] - value).abs().max()) < bound, (what, name)


def _all_changes(rank: int, world_size: int, expected: dict[str, dict[str, Tensor]]) -> None:
    world = World(rank, world_size, rank)
    for change in CHANGES:
        for name in ("ddp", "fsdp2", "zero0", "zero2", "zero3"):
            found = moments(build(name, world, pairs=PAIRS), change)
            if world.is_main:
                assert_close(found, expected[change.__name__], (name, change.__name__))


def test_locked_recomputed_and_shared_weights() -> None:
    single = {c.__name__: moments(build("single", World(), pairs=PAIRS), c) for c in CHANGES}
    run_distributed(_all_changes, single, world_size=2, timeout=280)


def _all_engines(rank: int, world_size: int, expected: dict[str, Tensor]) -> None:
    world = World(rank, world_size, rank)
    for name, engine in (
        ("fsdp2", EACH),
        ("fsdp2", FRUGAL),
        ("fsdp2", GREEDY),
        ("zero2", EACH),
        ("zero3", EACH),
    ):
        found = moments(build(name, world, pairs=PAIRS, engine=engine))
        if world.is_main:
            assert_close(found, expected, (name, engine))
    for name in ("ddp", "fsdp2", "zero0", "zero2"):
        _check_adopted(name, world, expected)


def _check_adopted(name: str, world: World, expected: dict[str, Tensor]) -> None:
    """The same two steps in a loop of one's own."""
    strategy = build(name, world, pairs=PAIRS)
    strategy.setup(tiny_encoders(), OPTIM)
    engine = AdoptedModel(strategy.hookable)
    for _ in range(2):
        backward(engine, DiscoLoss(normalize=True))
        strategy.step(OPTIM.lr)
    found = strategy.state().moments
    strategy.close()
    if world.is_main:
        assert_close(found, expected, f"adopted {name}")


def test_options_and_loops_of_ones_own() -> None:
    expected = moments(build("single", World(), pairs=PAIRS))
    run_distributed(_all_engines, expected, world_size=2, timeout=280)


def test_blocks_are_found_in_every_tower() -> None:
    encoders = create_clip(ModelConfig(name="disco-demo-vit"), seed=0).encoders
    assert len(transformer_blocks(encoders)) == 4 + 2
    resnet = tiny_encoders(resnet=True)
    blocks = transformer_blocks(resnet)
    assert len(blocks) == 4 + 2
    assert checkpoint_blocks_(blocks) == 2  # BatchNorm would count a batch twice


def test_towers_recompute_separately() -> None:
    def recomputed(**options: object) -> int:
        config = ModelConfig("disco-demo-vit", activation_checkpointing=True, **options)  # type: ignore[arg-type]
        encoders = create_clip(config, seed=0).encoders
        return sum("forward" in vars(block) for block in transformer_blocks(encoders))

    assert recomputed() == 6
    assert recomputed(checkpoint_towers="image", checkpoint_every=2) == 2
    assert recomputed(checkpoint_towers="text") == 2
    with pytest.warns(UserWarning, match="no effect on the text tower"):
        assert recomputed(checkpoint_every=3) == 1


def test_a_locked_towers_batch_norm_stays_put() -> None:
    config = ModelConfig(name="disco-demo-rn", lock_image=True)
    encoders = create_clip(config, seed=0).encoders
    norms = [m for m in encoders.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms and not any(norm.training for norm in norms)
    assert encoders.training and encoders.train().training


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks(checkpointing: bool) -> None:
    """With the compiler's front end alone: what it makes of it needs minutes on two cores."""
    pairs = random_pairs(4)
    results = []
    for backend in (None, "eager"):
        encoders = tiny_encoders(checkpointing=checkpointing)
        if backend:
            compile_blocks_(transformer_blocks(encoders), backend=backend)
        image, text = encoders(pairs.image, pairs.text)
        (image.sum() + text.sum()).backward()
        results.append([p.grad for p in encoders.parameters()])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)


def _compiled(rank: int, world_size: int, expected: dict[str, Tensor]) -> None:
    world = World(rank, world_size, rank)
    for name in ("ddp", "fsdp2", "zero1", "zero2"):
        strategy = build(name, world, pairs=PAIRS, engine=EngineConfig(compile=True))
        found = moments(strategy, lambda e: checkpoint_blocks_(transformer_blocks(e)) and None)
        if world.is_main:
            assert_close(found, expected, name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_strategies() -> None:
    expected = moments(build("single", World(), pairs=PAIRS))
    run_distributed(_compiled, expected, world_size=2, timeout=1100)
