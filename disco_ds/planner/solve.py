"""How far it goes: the largest batch, and the cheapest setting for a wanted one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from disco_ds.losses.disco import DiscoConfig
from disco_ds.planner.cost import Hardware
from disco_ds.planner.plan import Plan, make_plan
from disco_ds.planner.request import LossConfig, PlanRequest

STAGES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
TILES = (None, 512)
LARGEST_LOCAL_BATCH = 2**26


def largest_batch(
    request: PlanRequest, hardware: Hardware, *, micro_batch_size: int | None = None
) -> Plan | None:
    """The largest global batch that fits, all else as in ``request``; None when nothing does.

    ``micro_batch_size`` None runs the local batch in one forward.
    """

    def plan(local: int) -> Plan:
        size = max(2, local * request.world_size)
        changed = request.with_(global_batch_size=size, micro_batch_size=micro_batch_size)
        return make_plan(changed, hardware)

    best = plan(1)
    if not best.fits:
        return None
    low, high = 1, 2
    while high <= LARGEST_LOCAL_BATCH and (grown := plan(high)).fits:
        best, low, high = grown, high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if (tried := plan(middle)).fits:
            best, low = tried, middle
        else:
            high = middle
    return best


def cheapest(request: PlanRequest, hardware: Hardware) -> Plan | None:
    """The setting with the lowest time floor that fits the wanted batch; None when none does.

    Micro-batch, checkpointing, engine, ring or gather and tile are free; model, precision, loss and
    ranks are as in ``request``. The order among equals: fewer micro-batches, no checkpointing, the
    simpler engine, all-gather, default tiles.
    """
    best: Plan | None = None
    for candidate in settings(request):
        plan = make_plan(candidate, hardware)
        if plan.fits and (best is None or _seconds(plan) < 0.999 * _seconds(best)):
            best = plan
    return best


def _seconds(plan: Plan) -> float:
    return plan.time.serial


def settings(request: PlanRequest) -> Iterator[PlanRequest]:
    """All settings of a wanted batch, simplest first."""
    stages = STAGES if request.world_size > 1 else ("single",)
    for micro in micro_sizes(request.local_batch_size):
        for checkpointing in (False, True):
            model = replace(request.model, activation_checkpointing=checkpointing)
            for stage in stages:
                for loss in _losses(request):
                    yield request.with_(
                        model=model,
                        micro_batch_size=micro,
                        strategy=stage,
                        ds_config=None,
                        loss=loss,
                    )


def micro_sizes(local: int) -> list[int]:
    """Local batch and its halvings."""
    sizes = [local]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _losses(request: PlanRequest) -> list[LossConfig]:
    """All-gather or ring, default or small tiles; the ring takes no reduction of gradients."""
    loss = request.loss
    found: list[LossConfig] = []
    for gather in ("all", "ring"):
        reduces = isinstance(loss, DiscoConfig) and loss.gradient_reduction != "scalar_gather"
        if gather == "ring" and (reduces or request.world_size == 1):
            continue
        found += [replace(loss, gather=gather, tile_size=tile) for tile in TILES]
    return found


def remedy(request: PlanRequest, hardware: Hardware) -> Plan | None:
    """The same batch on the same engine, made to fit: checkpointing, then smaller micro-batches."""
    for micro in micro_sizes(request.micro_batch):
        for checkpointing in sorted({request.model.activation_checkpointing, True}):
            model = replace(request.model, activation_checkpointing=checkpointing)
            plan = make_plan(request.with_(model=model, micro_batch_size=micro), hardware)
            if plan.fits:
                return plan
    return None
