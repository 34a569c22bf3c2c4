"""Bytes kept for backward, the largest tensor of a call, and bytes on the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from loss_cases import batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from disco_ds.losses import DiscoLoss, SigLIPLoss
from disco_ds.losses.inputs import Header

PAIRS, DIM, TILE = 1024, 64, 64
LOSSES = [DiscoLoss(tile_size=TILE), SigLIPLoss(tile_size=TILE), DiscoLoss()]


def features() -> list[Tensor]:
    return [f.float().requires_grad_() for f in batch("random", PAIRS, DIM)]


@pytest.mark.parametrize("loss", LOSSES, ids=["disco", "siglip", "disco-default"])
def test_saved_for_backward_is_at_most_the_features_and_one_chunk(loss: torch.nn.Module) -> None:
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss(*features(), 14.3)
    value.backward()
    feature_bytes = 2 * PAIRS * DIM * 4
    assert sum(saved.values()) <= feature_bytes + 16
    assert sum(saved.values()) <= 2 * (feature_bytes + TILE * PAIRS * 4)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest storage that any operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("loss", LOSSES[:2], ids=["disco", "siglip"])
def test_nothing_is_larger_than_the_features(loss: torch.nn.Module) -> None:
    with LargestTensor() as largest:
        loss(*features(), 14.3).backward()
    assert largest.nbytes <= PAIRS * DIM * 8  # 1024 rows in float64; a [B, B] would be 8 times that


class Wire:
    """Bytes received per rank by ring collectives, counted where the losses call them."""

    def __init__(self, world_size: int) -> None:
        self.share = (world_size - 1) / world_size
        self.received = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        names = {
            "all_gather_single": lambda out, own, *a, **k: self.share * out.nbytes,
            "all_gather_into_tensor": lambda out, own, *a, **k: self.share * out.nbytes,
            "all_to_all_single": lambda out, own, *a, **k: self.share * out.nbytes,
            "reduce_scatter_single": lambda out, own, *a, **k: self.share * own.nbytes,
            "reduce_scatter_tensor": lambda out, own, *a, **k: self.share * own.nbytes,
            "all_reduce": lambda tensor, *a, **k: 2 * self.share * tensor.nbytes,
            "batch_isend_irecv": lambda ops: sum(
                op.tensor.nbytes for op in ops if op.op is dist.irecv
            ),
        }
        patches = [
            patch.object(dist, name, self._counted(getattr(dist, name), nbytes))
            for name, nbytes in names.items()
            if hasattr(dist, name)
        ]
        for item in patches:
            item.start()
        try:
            yield
        finally:
            for item in patches:
                item.stop()

    def _counted(self, collective: Any, nbytes: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.received += nbytes(*args, **kwargs)
            return collective(*args, **kwargs)

        return call


def expected_bytes(kind: str, options: dict[str, Any], pairs: int, world_size: int) -> float:
    """Return the formula of the docstrings: the table's terms, times (W - 1) / W."""
    total, dim = pairs * world_size, DIM
    wire = 2 if options.get("wire_dtype") == torch.bfloat16 else 4
    scalars = 8 * Header.length() * world_size + 4 * world_size
    if kind == "siglip":
        return (2 * wire * total * dim + scalars) * (world_size - 1) / world_size
    feature_bytes = {
        ("all", "scalar_gather"): 2 * wire * total * dim,
        ("ring", "scalar_gather"): 3 * wire * total * dim,
        ("all", "reduce_scatter"): (wire + 4) * total * dim,
        ("all", "all_reduce"): (wire + 8) * total * dim,
    }[options.get("gather", "all"), options.get("gradient_reduction", "scalar_gather")]
    return (feature_bytes + 12 * total + scalars) * (world_size - 1) / world_size


def wire_worker(rank: int, world_size: int) -> None:
    pairs = 16
    rows = slice(rank * pairs, (rank + 1) * pairs)
    variants: list[tuple[str, dict[str, Any]]] = [
        ("disco", {}),
        ("disco", {"wire_dtype": torch.bfloat16}),
        ("disco", {"gather": "ring"}),
        ("disco", {"gradient_reduction": "reduce_scatter"}),
        ("disco", {"gradient_reduction": "all_reduce"}),
        ("siglip", {}),
        ("siglip", {"gather": "ring", "wire_dtype": torch.bfloat16}),
    ]
    for kind, options in variants:
        own = [f[rows].float().requires_grad_() for f in batch("random", pairs * world_size, DIM)]
        wire = Wire(world_size)
        with wire.counting():
            value = (DiscoLoss if kind == "disco" else SigLIPLoss)(**options)(*own, 14.3)
            forward = wire.received
            value.backward()
        assert forward == expected_bytes(kind, options, pairs, world_size), (kind, options)
        assert wire.received == forward, "backward must not communicate"


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_on_the_wire_are_those_of_the_docstring(world_size: int) -> None:
    run_distributed(wire_worker, world_size=world_size)


def evaluation_worker(rank: int, world_size: int) -> None:
    """Without gradients the images stay at home."""
    own = [f[rank * 16 :][:16].float() for f in batch("random", 32, DIM)]
    wire = Wire(world_size)
    with wire.counting(), torch.no_grad():
        DiscoLoss()(*own, 14.3)
    scalars = 12 * 32 + 8 * Header.length() * 2 + 4 * 2
    assert wire.received == (4 * 32 * DIM + scalars) / 2


def test_evaluation_gathers_one_side() -> None:
    run_distributed(evaluation_worker, world_size=2)


@pytest.mark.parametrize("options", [{}, {"gather": "ring"}], ids=str)
def test_a_planner_can_trace_a_call_without_memory(options: dict[str, Any]) -> None:
    """Fake tensors, fake ranks: 8 x 32768 pairs, whose logits would take 32 GiB."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with FakeTensorMode():
            leaves = [torch.empty(32768, 64, requires_grad=True) for _ in range(2)]
            loss = DiscoLoss(tile_size=32768, **options)
            loss(*leaves, torch.ones((), requires_grad=True)).backward()
        assert leaves[1].grad.shape == (32768, 64)
        assert loss.metrics()["chance_level"] == pytest.approx(math.log(8 * 32768))
    finally:
        dist.destroy_process_group()
