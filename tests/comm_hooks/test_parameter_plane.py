"""Hooks of the parameter plane: they see every gradient of every engine, and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from hook_cases import CONFIGURATIONS, PAIRS, Zeroing, make, moments, num_parameters, step
from tiny import random_pairs, rows_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from disco_ds.comm_hooks import (
    CommHook,
    CompressedReduction,
    CountingHook,
    FastCLIPReduction,
    compose,
)
from disco_ds.comm_hooks import register_comm_hook as register
from disco_ds.comm_hooks.deepspeed import UnhookedGradients
from disco_ds.distributed import World
from disco_ds.losses import DiscoLoss
from disco_ds.strategies.base import Strategy

SLOW = pytest.mark.slow
DEFAULT = [
    "ddp",
    "fsdp2",
    "zero0",
    "zero1",
    "zero2",
    "zero2, each micro-batch",
    "zero2, reduce to owners",
    "zero2_offload",
    "zero3",
    "zero3, reduce_scatter off",
]


def _passing_and_zeroing(rank: int, world_size: int, names: list[str]) -> None:
    world = World(rank, world_size, rank)
    for name in names:
        plain = make(name, world)
        step(plain)
        expected = moments(plain)
        plain.close()
        for hook in (CommHook(), Zeroing(), CompressedReduction(error_feedback=False)):
            hooked = make(name, world)
            register(hooked.hookable, hook)
            step(hooked)
            found = moments(hooked)
            hooked.close()
            for key, value in expected.items():
                if type(hook) is CommHook:
                    assert torch.equal(found[key], value), (name, key)
                elif isinstance(hook, Zeroing):
                    assert not found[key].any(), (name, key)
            if isinstance(hook, CompressedReduction) and world.is_main:
                error = _norm({key: found[key] - value for key, value in expected.items()})
                assert error < 2**-7 * _norm(expected), (name, error)


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(tensors.values())))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(DEFAULT, id="common"),
        pytest.param([n for n in CONFIGURATIONS if n not in DEFAULT], marks=SLOW, id="rest"),
    ],
)
def test_every_gradient_goes_through_the_hook(names: list[str]) -> None:
    """Passing on is bitwise nothing, zeroing leaves exactly nothing, rounding stays in bounds."""
    run_distributed(_passing_and_zeroing, names, world_size=2, timeout=290)


def _counts(rank: int, world_size: int) -> None:
    """Bytes are those of the parameters, to the last one."""
    world = World(rank, world_size, rank)
    sizes = num_parameters()
    total = 4 * sum(sizes)
    padded = 4 * sum(-(-size // world_size) * world_size for size in sizes)
    for name, collective, expected in (
        ("ddp", "all_reduce", total),
        ("zero0", "all_reduce", total),
        ("zero1", "all_reduce", total),
        ("zero2", "all_reduce", total),
        ("zero2, each micro-batch", "all_reduce", 2 * total),
        ("zero2, reduce to owners", "reduce", total),
        ("zero3", "reduce_scatter", padded),
        ("zero3, each micro-batch", "reduce_scatter", 2 * padded),
    ):
        strategy = make(name, world)
        hook, compressed = CountingHook(), CountingHook()
        # What the second one sees has gone through the compression.
        register(strategy.hookable, compose(hook, CompressedReduction(), compressed))
        for seed in range(2):
            step(strategy, seed=seed)
            found = hook.metrics()
            assert found[f"comm/parameters/{collective}_bytes"] == expected, (name, found)
            assert len(found) == 2, found
            half = compressed.metrics()
            assert half[f"comm/parameters/{collective}_bytes"] * 2 == expected, (name, half)
        strategy.close()


def _error_feedback(rank: int, world_size: int) -> None:
    """The same gradient again and again, of one rank: on average rounding takes nothing away.

    (With two ranks that contribute, the sum is rounded once more inside the collective.)
    """
    gradient = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * (rank == 0)
    errors = {}
    for feedback in (False, True):
        model = nn.parallel.DistributedDataParallel(nn.Linear(1000, 1, bias=False))
        register(model, CompressedReduction(torch.bfloat16, error_feedback=feedback))
        sums = torch.zeros(1000, dtype=torch.float64)
        for _ in range(64):
            model.zero_grad()
            model(gradient[None]).sum().backward()
            sums += model.module.weight.grad[0].double()
        mean = gradient.double()
        dist.all_reduce(mean)
        errors[feedback] = float((sums / 64 - mean / world_size).abs().max())
    assert errors[True] < errors[False] / 16, errors


def test_error_feedback_keeps_the_mean() -> None:
    run_distributed(_error_feedback, world_size=2)


class _Chain(nn.Module):
    """DDP groups its parameters anew after the first step: backward meets ``b`` first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.b(self.a(inputs))
        return values


def _regrouped(rank: int, world_size: int) -> None:
    """Errors of one step never reach another parameter, whatever DDP does with its buckets."""
    torch.manual_seed(0)
    own = _Chain()
    own.b.weight.data.mul_(1e3)  # gradients of very different size
    hook = CompressedReduction(torch.bfloat16)
    model = nn.parallel.DistributedDataParallel(own)
    register(model, hook)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(7))
    for number in range(3):
        model.zero_grad()
        model(inputs).square().sum().backward()
        exact = torch.autograd.grad(own(inputs).square().sum(), list(own.parameters()))
        for parameter, gradient in zip(own.parameters(), exact, strict=True):
            error = (parameter.grad - gradient).abs().max() / gradient.abs().max()
            assert error < 2**-6, (number, float(error))
    other = CompressedReduction(torch.bfloat16)
    other.load_state(hook.state())
    assert other.state().keys() == hook.state().keys()


def test_error_feedback_survives_regrouped_buckets() -> None:
    run_distributed(_regrouped, world_size=2)


def _meshes(rank: int, world_size: int) -> None:
    """A loss is bound to the ranks over which FSDP2 averages; two dimensions are refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    part = nn.Linear(6, 6, bias=False)
    fully_shard(part, mesh=mesh["shard"])
    loss = DiscoLoss(normalize=True)
    register(part, FastCLIPReduction(), loss=loss)
    assert loss.process_group is mesh["shard"].get_group()
    both = nn.Linear(6, 6, bias=False)
    fully_shard(both, mesh=mesh)
    with pytest.raises(ValueError, match=r"mesh of 2 dimensions \(2, 2\)"):
        register(both, CompressedReduction())
    with pytest.raises(ValueError, match="no parameter of this model is sharded"):
        register(fully_shard(nn.Sequential(nn.Identity())), CommHook())


def test_fsdp2_over_a_part_of_the_ranks() -> None:
    run_distributed(_meshes, world_size=4)


def _removal(rank: int, world_size: int) -> None:
    """A removed hook leaves everything as it was and makes room for another."""
    from deepspeed.comm import comm

    world = World(rank, world_size, rank)
    for name in ("zero0", "zero2", "zero3", "ddp", "fsdp2"):
        strategy = make(name, world)
        backend, methods = comm.cdb, set(vars(strategy.hookable))
        first = register(strategy.hookable, Zeroing())
        with pytest.raises(ValueError, match="has a communication hook"):
            register(strategy.hookable, CommHook())
        first.remove()
        first.remove()
        assert comm.cdb is backend
        if name.startswith("zero"):
            assert set(vars(strategy.hookable)) == methods
        step(strategy)
        found = moments(strategy)
        assert not world.is_main or all(value.any() for value in found.values())
        again = CountingHook()
        register(strategy.hookable, again)
        step(strategy)
        assert again.metrics()
        strategy.close()


def _two_engines(rank: int, world_size: int) -> None:
    """Engines of one process have their own hooks."""
    world = World(rank, world_size, rank)
    hooks = {"zero2": CountingHook(), "zero3": CountingHook()}
    engines = {name: make(name, world) for name in hooks}
    handles = [register(engines[name].hookable, hook) for name, hook in hooks.items()]
    for active in hooks:
        step(engines[active])
        for name, hook in hooks.items():
            assert bool(hook.metrics()) == (name == active)
    handles[0].remove()
    for name in hooks:
        step(engines[name])
        assert bool(hooks[name].metrics()) == (name == "zero3")
    for engine in engines.values():
        engine.close()


class _Failing(CommHook):
    def __init__(self) -> None:
        self.fail = True

    def reduce(self, reduction: object) -> None:
        if self.fail:
            raise FloatingPointError("inside the hook")
        super().reduce(reduction)  # type: ignore[arg-type]


def _backward_raises(strategy: Strategy) -> None:
    """A backward pass that fails after the first gradient reached an output."""
    pairs = rows_of(random_pairs(PAIRS), strategy.world.rank, strategy.world.world_size)
    image, _ = strategy.encode(pairs.image, pairs.text)
    assert image is not None

    def fail(gradient: torch.Tensor) -> None:
        raise FloatingPointError("in the backward")

    strategy.module.clip.visual.proj.register_hook(fail)
    with pytest.raises(FloatingPointError, match="in the backward"):
        strategy.backward(image.sum())


def _exceptions(rank: int, world_size: int) -> None:
    """Whatever raises, nothing stays live."""
    world = World(rank, world_size, rank)
    for name in ("zero0", "zero1", "zero2, each micro-batch", "zero3, each micro-batch"):
        strategy = make(name, world)
        counting, failing = CountingHook(), _Failing()
        register(strategy.hookable, compose(counting, failing))
        with pytest.raises(FloatingPointError):
            step(strategy)
        counting.metrics()
        # Nothing of the failed pass is live: an ordinary sum is not taken for gradients.
        import deepspeed

        deepspeed.comm.all_reduce(torch.ones(8))
        assert not counting.metrics(), name
        strategy.close()
    strategy = make("zero2, each micro-batch", world)
    counting = CountingHook()
    register(strategy.hookable, counting)
    _backward_raises(strategy)
    deepspeed.comm.all_reduce(torch.ones(8))
    assert not counting.metrics()


def _another_way(rank: int, world_size: int) -> None:
    """A DeepSpeed that reduces a part, or all, past its backend object is noticed."""
    world = World(rank, world_size, rank)
    for name, every in (("zero0", 1), ("zero2", 1), ("zero2", 3), ("zero3", 2)):
        strategy = make(name, world)
        register(strategy.hookable, CommHook())
        from deepspeed.comm import comm

        backend, calls = comm.cdb, []
        owner = type(backend)._owner

        def bypass(*args: object, owner=owner, calls=calls, every=every) -> object:  # type: ignore[no-untyped-def]
            found = owner(*args)
            calls.append(1)
            return None if len(calls) % every == 0 else found

        type(backend)._owner = bypass  # type: ignore[method-assign]
        try:
            with pytest.raises(UnhookedGradients, match="gradient elements"):
                step(strategy)
        finally:
            type(backend)._owner = owner  # type: ignore[method-assign]
        strategy.close()


def _demo_like(rank: int, world_size: int) -> None:
    """Compressed with error feedback trains to the same loss."""
    world = World(rank, world_size, rank)
    losses = []
    for hook in (CommHook(), CompressedReduction(torch.bfloat16)):
        strategy = make("zero2", world)
        register(strategy.hookable, hook)
        losses.append([step(strategy, seed=0, micro=1) for _ in range(30)])
        strategy.close()
    assert losses[0][-1] < losses[0][0] / 2
    assert abs(losses[0][-1] - losses[1][-1]) < 0.02 * losses[0][0], losses


def _behaviour(rank: int, world_size: int) -> None:
    """One pair of workers for all: importing DeepSpeed takes longer than any of them."""
    for part in (_counts, _removal, _two_engines, _another_way, _demo_like, _exceptions):
        part(rank, world_size)


def test_counting_removal_several_engines_bypasses_and_exceptions() -> None:
    run_distributed(_behaviour, world_size=2, timeout=290)


def test_what_cannot_be_hooked_says_so() -> None:
    with pytest.raises(ValueError, match="no communication to hook in a Linear"):
        register(nn.Linear(1, 1), CommHook())
    with pytest.raises(ValueError, match="not 16 bits"):
        CompressedReduction(torch.float32)
    with pytest.raises(ValueError, match="error_feedback false"):
        CompressedReduction().check(fp16=True)
