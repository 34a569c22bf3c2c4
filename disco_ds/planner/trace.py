"""The real training step on fake tensors: its peak of memory and its collectives.

Everything that allocates is the code of a real run: open_clip's model, the engine (DeepSpeed's
included), the two-pass step, the loss, the optimizer. See :mod:`disco_ds.planner.fake` for what a
world without hardware replaces.
"""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from disco_ds.models import Encoders
from disco_ds.planner.fake import ddp_buckets_in, fake_encoders, fake_world
from disco_ds.planner.meter import MemoryMeter
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.step import Measured, MeteredStep, blank_inputs
from disco_ds.strategies.base import Strategy


@dataclass(frozen=True)
class Trace:
    """What a step on fake tensors showed."""

    step: Measured
    seconds: float


def trace(request: PlanRequest, *, like_cuda: bool = True) -> Trace:
    """Run a step of ``request`` on fake tensors.

    Args:
        request: what to run.
        like_cuda: allocate as a GPU would, else as the CPU does (to compare with a real CPU run).

    Raises:
        ValueError: the request makes no sense, this process has a process group, or the engine
            keeps state in host memory, which a fake CPU cannot tell from a device.
    """
    if request.offloads:
        raise ValueError(
            f"--trace: {request.strategy} keeps state in host memory, and the fake device is a CPU "
            "too; leave --trace out (closed forms), or trace the strategy without offload"
        )
    begin = time.perf_counter()
    with ExitStack() as stack, warnings.catch_warnings():
        # DeepSpeed asks for addresses, and for collectives by their former names.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", category=FutureWarning)
        world = stack.enter_context(fake_world(request.world_size, like_cuda=like_cuda))
        encoders, image_size, context = fake_encoders(request.model)
        if request.strategy == "ddp":
            order = gradient_order(encoders, image_size, context)
            stack.enter_context(ddp_buckets_in(order))
        meter = stack.enter_context(MemoryMeter())
        shape = (image_size, context)
        step = MeteredStep(request, world, encoders, shape, meter, stack, is_fake=True)
        if like_cuda:
            use_foreach(step.strategy)
        return Trace(step.measure(warm_up=1), time.perf_counter() - begin)


def gradient_order(encoders: Encoders, image_size: tuple[int, int], context: int) -> list[int]:
    """Positions of the trainable parameters in the order in which their gradients arrive."""
    order: list[int] = []
    parameters = [p for p in encoders.parameters() if p.requires_grad]
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
        for number, parameter in enumerate(parameters)
    ]
    image, text = encoders(*blank_inputs(2, image_size, context))
    (image.sum() + text.sum()).backward()
    for handle in handles:
        handle.remove()
    for parameter in parameters:
        parameter.grad = None
    return order


def use_foreach(strategy: Strategy) -> None:
    """On a GPU torch's optimizers update many tensors per launch, which takes temporaries."""
    inner: Any = getattr(strategy, "optimizer", None) or getattr(strategy, "_torch_optimizer", None)
    for group in inner.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
