"""The same step on real tensors and real ranks, counted by the same meter."""

from __future__ import annotations

import gc
from contextlib import ExitStack

from disco_ds.distributed import World
from disco_ds.models import create_clip
from disco_ds.planner.fake import context_length
from disco_ds.planner.meter import MemoryMeter
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.step import Measured, MeteredStep

# DDP has rebuilt its buckets by the third step.
WARM_UP_STEPS, COUNTED_STEPS = 2, 3


def measure(request: PlanRequest, world: World) -> Measured:
    """Take a few real steps on meaningless inputs and count the last ones. Collective."""
    with ExitStack() as stack:
        parts = create_clip(request.model, seed=0)
        encoders = parts.encoders.to(world.device)
        meter = stack.enter_context(MemoryMeter())
        shape = (parts.image_size, context_length(request.model.name))
        step = MeteredStep(request, world, encoders, shape, meter, stack, is_fake=False)
        gc.collect()  # engines are full of cycles; what an earlier one left would be counted
        return step.measure(warm_up=WARM_UP_STEPS, counted=COUNTED_STEPS)
