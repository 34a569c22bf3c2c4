"""Small engines of every kind, one training step, and hooks that make themselves seen."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from engines import build, zero_json
from tiny import random_pairs, rows_of, tiny_encoders
from torch import Tensor

from disco_ds.comm_hooks import CommHook, Reduction
from disco_ds.distributed import World
from disco_ds.grad_cache import contrastive_backward
from disco_ds.losses import DiscoLoss
from disco_ds.models import Temperature, TemperatureConfig
from disco_ds.optim import OptimConfig
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.config import EngineConfig

PAIRS = 12
# A large epsilon: moments and updates are nearly linear in the gradients.
OPTIM = OptimConfig(lr=1e-3, warmup_steps=0, eps=1e-3)
EACH = EngineConfig(reduce_every_micro_batch=True)

# name -> (strategy, changes of the JSON's zero_optimization, of the rest, engine options)
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], EngineConfig | None]] = {
    "ddp": ("ddp", {}, {}, None),
    "fsdp2": ("fsdp2", {}, {}, None),
    "fsdp2, each micro-batch": ("fsdp2", {}, {}, EACH),
    "zero0": ("zero0", {}, {}, None),
    "zero1": ("zero1", {}, {}, None),
    "zero1, overlap_comm": ("zero1", {"overlap_comm": True}, {}, None),
    "zero2": ("zero2", {}, {}, None),
    "zero2, each micro-batch": ("zero2", {}, {}, EACH),
    "zero2, overlap_comm": ("zero2", {"overlap_comm": True}, {}, EACH),
    "zero2, contiguous_gradients off": ("zero2", {"contiguous_gradients": False}, {}, EACH),
    "zero2, reduce_scatter off": ("zero2", {"reduce_scatter": False}, {}, None),
    "zero2, reduce to owners": ("zero2", {"use_multi_rank_bucket_allreduce": False}, {}, None),
    "zero2_offload": ("zero2_offload", {}, {}, None),
    "zero2, bf16 on the wire": ("zero2", {}, {"communication_data_type": "bf16"}, None),
    "zero3": ("zero3", {}, {}, None),
    "zero3, each micro-batch": ("zero3", {}, {}, EACH),
    "zero3, overlap_comm": ("zero3", {"overlap_comm": True}, {}, EACH),
    "zero3, reduce_scatter off": ("zero3", {"reduce_scatter": False}, {}, None),
    "zero3_offload": ("zero3_offload", {}, {}, None),
}


class Zeroing(CommHook):
    """Whatever passes by this hook is gone."""

    def reduce(self, reduction: Reduction) -> None:
        reduction.send(torch.zeros_like(reduction.input))


def make(configuration: str, world: World) -> Strategy:
    name, zero, rest, engine = CONFIGURATIONS[configuration]
    json = None
    if name.startswith("zero"):
        json = {**rest, "zero_optimization": {**zero_json(name)["zero_optimization"], **zero}}
    strategy = build(name, world, pairs=PAIRS, engine=engine, json=json)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy.setup(tiny_encoders(), OPTIM)
    return strategy


def loss_of(strategy: Strategy) -> DiscoLoss:
    return DiscoLoss(process_group=strategy.process_group, normalize=True)


def step(strategy: Strategy, *, seed: int = 0, micro: int = 2, loss: Any = None) -> float:
    """One optimizer step; the loss."""
    world = strategy.world
    pairs = rows_of(random_pairs(PAIRS, seed=seed), world.rank, world.world_size)
    value = contrastive_backward(
        strategy,
        loss or loss_of(strategy),
        Temperature(TemperatureConfig()),
        pairs,
        micro_batch_size=-(-len(pairs.index) // micro),
    )
    strategy.step(OPTIM.lr)
    return float(value)


def moments(strategy: Strategy) -> dict[str, Tensor]:
    """First moments: a multiple of the gradients after one step. On the main rank."""
    state = strategy.state()
    return {name: value for name, value in state.moments.items() if name.startswith("exp_avg/")}


def num_parameters() -> list[int]:
    return [parameter.numel() for parameter in tiny_encoders().parameters()]
