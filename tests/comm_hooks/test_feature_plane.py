"""Hooks of the feature plane: same gradients, other bytes, and those that the losses state."""

from __future__ import annotations

import pytest
import torch
from harness import run_distributed
from hook_cases import PAIRS, make, moments, step

from disco_ds.comm_hooks import (
    CommHook,
    CommHookConfig,
    CountingHook,
    DiscoReduction,
    FastCLIPReduction,
    OpenCLIPReduction,
    compose,
    register_comm_hook,
)
from disco_ds.distributed import World
from disco_ds.losses import DiscoLoss, SigLIPLoss

DIM = 8
FEATURE_HOOKS: tuple[type[CommHook], ...] = (FastCLIPReduction, OpenCLIPReduction, DiscoReduction)


def _bytes_and_gradients(rank: int, world_size: int) -> None:
    world = World(rank, world_size, rank)
    matrix = 4 * PAIRS * DIM
    # Two float64 vectors of 15 numbers per rank agree on the call; one more number per rank and
    # the log-sum-exps of rows and columns are exchanged.
    expected = {
        FastCLIPReduction: {"all_gather": 2 * matrix},
        OpenCLIPReduction: {"all_gather": matrix, "reduce_scatter": matrix},
        DiscoReduction: {"all_gather": matrix, "all_reduce": matrix},
    }
    results = {}
    for kind in FEATURE_HOOKS:
        strategy = make("zero2", world)
        loss = DiscoLoss(process_group=None, normalize=True)
        counting = CountingHook()
        handle = register_comm_hook(strategy.hookable, compose(kind(), counting), loss=loss)
        for _ in range(2):
            step(strategy, loss=loss)
        found = counting.metrics()
        for collective, size in expected[kind].items():
            scalars = found[f"comm/features/{collective}_bytes"] - size
            assert 0 <= scalars < 8 * (15 * world_size + 3 * PAIRS), (kind, collective, found)
        assert set(expected[kind]) | {"all_to_all"} == {
            key.split("/")[-1].removesuffix("_bytes")
            for key in found
            if "features" in key and key.endswith("_bytes")
        }
        assert found["comm/features/all_to_all_bytes"] == 4 * PAIRS
        results[kind] = moments(strategy)
        handle.remove()
        assert loss.process_group is None and loss.gradient_reduction == "scalar_gather"
        strategy.close()
    for key, value in results[FastCLIPReduction].items():
        for other in (OpenCLIPReduction, DiscoReduction):
            torch.testing.assert_close(results[other][key], value, rtol=1e-4, atol=1e-5)


def test_same_gradients_other_bytes() -> None:
    run_distributed(_bytes_and_gradients, world_size=2)


def test_a_hook_sets_and_restores_the_loss() -> None:
    loss = DiscoLoss()
    undo = OpenCLIPReduction(wire_dtype=torch.bfloat16).bind(loss, None)
    assert (loss.gradient_reduction, loss.wire_dtype) == ("reduce_scatter", torch.bfloat16)
    undo()
    assert (loss.gradient_reduction, loss.wire_dtype) == ("scalar_gather", None)


def test_a_refused_chain_leaves_the_loss_as_it_was() -> None:
    loss = SigLIPLoss()
    chain = compose(FastCLIPReduction(wire_dtype=torch.bfloat16), DiscoReduction())
    with pytest.raises(ValueError, match="sends no feature gradients"):
        chain.bind(loss, None)
    assert loss.wire_dtype is None


def test_what_a_loss_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="SigLIPLoss sends no feature gradients"):
        OpenCLIPReduction().bind(SigLIPLoss(), None)
    FastCLIPReduction().bind(SigLIPLoss(), None)
    with pytest.raises(ValueError, match='gather="all"'):
        DiscoReduction().bind(DiscoLoss(gather="ring"), None)
    with pytest.raises(ValueError, match=r"a loss of disco_ds\.losses, got Linear"):
        FastCLIPReduction().bind(torch.nn.Linear(1, 1), None)


def test_hooks_by_name() -> None:
    assert CommHookConfig().build() is None
    assert isinstance(CommHookConfig(count=True).build(), CountingHook)
    assert CommHookConfig(name="disco", compress="bf16").build() is not None
    with pytest.raises(ValueError, match=r"needs --comm_hook\.name"):
        CommHookConfig(wire_dtype="bf16")
