"""The strategy of a plan, as a run would have it."""

from __future__ import annotations

from collections.abc import Callable

from disco_ds.distributed import World
from disco_ds.planner.request import PlanRequest
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.ddp import DDPStrategy
from disco_ds.strategies.ds_config import resolve_ds_config
from disco_ds.strategies.fsdp2 import FSDP2Strategy
from disco_ds.strategies.single import SingleStrategy
from disco_ds.strategies.zero import ZeroStrategy


def make_strategy(request: PlanRequest, world: World) -> Strategy:
    """The engine of a request, not yet set up.

    Raises:
        ValueError: the request contradicts itself, as for a run.
    """
    if request.stage is not None:
        source = request.ds_source or f"ds_configs/{request.strategy}.json"
        config = resolve_ds_config(source, request.given_ds_config, request.numbers)
        return ZeroStrategy(world, ds_config=config, engine=request.engine)
    kinds: dict[str, Callable[..., Strategy]] = {
        "single": SingleStrategy,
        "ddp": DDPStrategy,
        "fsdp2": FSDP2Strategy,
    }
    return kinds[request.strategy](world, precision=request.precision, engine=request.engine)


def check_engine(request: PlanRequest) -> None:
    """Refuse what a run would refuse: engine, precision, optimizer and JSON must fit together.

    Raises:
        ValueError: naming flags or keys.
    """
    shards = request.stage in (2, 3) or request.strategy == "fsdp2"
    if request.engine.reduce_every_micro_batch and not shards:
        raise ValueError(
            f"--reduce_every_micro_batch with --strategy {request.strategy}: every rank holds "
            "whole gradients there; leave it out, or use zero2, zero3 or fsdp2"
        )
    make_strategy(request, World(0, request.world_size)).check_optimizer(request.optim)
