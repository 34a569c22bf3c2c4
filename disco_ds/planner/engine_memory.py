"""What each engine keeps of weights, gradients and optimizer, and its own buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from disco_ds.planner.comm import ipg_buckets, padded_unit
from disco_ds.planner.fetches import Rules, fetches
from disco_ds.planner.profile import Profile, Weights
from disco_ds.planner.request import PlanRequest

Parts = dict[str, float]

# Bytes of optimizer state per element, beside the fp32 weight.
OPTIMIZER_BYTES = {"adamw": 8, "lamb": 8, "lion": 4, "sgdm": 4}
# Temporaries of a step that updates all tensors at once, per element; adamw is fused.
FOREACH_BYTES = {"adamw": 0, "lamb": 8, "lion": 4, "sgdm": 4}
# The same under FSDP2: some in-place operators of sharded tensors work out of place.
SHARDED_FOREACH_BYTES = {**FOREACH_BYTES, "sgdm": 12}
DEFAULT_ZERO_BUCKET = 500_000_000


@dataclass(frozen=True)
class EngineMemory:
    """Bytes by part."""

    at_rest: Parts
    gradient_share: float
    """Bytes that grow during a single backward, per byte of gradient."""
    accumulated: float
    """Whole gradients that lie there while a later micro-batch runs, beyond ``at_rest``."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights gathered during a phase."""
    early_weights: float = 0.0
    """Weights gathered early in a forward, while activations are few."""
    forward_begins: float = 0.0
    """Weights as a forward begins, before there is any activation."""
    backward_begins: float = 0.0
    """Weights as a backward begins, with all activations."""
    late_gradients: tuple[float, float] = (0.0, 0.0)
    """(bytes of the profile's gradients, bytes): what lies there once so many were made."""
    reduces_on_the_way: float = 0.0
    """Accumulated bytes per byte of the profile's gradients, where the last backward reduces and
    frees them as it goes; 0 where that happens at its end."""
    flush: Parts = field(default_factory=dict)
    """At the end of the backward: activations are gone, gradients are being reduced."""
    step: Parts = field(default_factory=dict)
    host: Parts = field(default_factory=dict)

    def gathered(self, phase: str) -> Parts:
        """Weights of other ranks that are here during a phase."""
        return {"gathered weights": self.weights.get(phase, 0.0)}


def engine_memory(request: PlanRequest, profile: Profile, *, like_cuda: bool) -> EngineMemory:
    """Choose the engine's formula."""
    if request.strategy == "fsdp2":
        return _fsdp2(request, profile, like_cuda)
    if request.stage in (1, 2):
        return _zero12(request, profile, like_cuda)
    if request.stage == 3:
        return _zero3(request, profile, like_cuda)
    return _replicated(request, profile, like_cuda)


def _replicated(request: PlanRequest, profile: Profile, like_cuda: bool) -> EngineMemory:
    """single, ddp and ZeRO stage 0: everything on every rank, in fp32."""
    weights = profile.weights
    trainable, buffers = weights.trainable, weights.buffers
    rest: Parts = {
        "parameters": 4.0 * weights.total + buffers,
        "optimizer": float(OPTIMIZER_BYTES[request.optim.name] * trainable),
    }
    whole = 4.0 * trainable
    step: Parts = {
        "optimizer temporaries": _temporaries(request, trainable, max(weights.sizes), like_cuda)
    }
    flush: Parts = {}
    if request.strategy == "ddp":
        rest["gradients"] = whole  # DDP's buckets
        share, accumulated = 0.0, whole
    else:
        share, accumulated = 1.0, whole
        step["gradients"] = whole
        if request.stage == 0:
            bucket = request.zero.get("reduce_bucket_size", DEFAULT_ZERO_BUCKET)
            flush = {"gradients": whole, "engine buffers": 4.0 * min(trainable, bucket)}
    return EngineMemory(rest, share, accumulated, flush=flush, step=step)


def _temporaries(
    request: PlanRequest,
    elements: float,
    largest: int,
    like_cuda: bool,
    foreach_bytes: Mapping[str, int] = FOREACH_BYTES,
) -> float:
    """On a GPU optimizers update all tensors at once, on a CPU one by one (two temporaries).

    AdamW is one kernel on both, without temporaries.
    """
    if not like_cuda and request.optim.name != "adamw":
        return 8.0 * largest
    return foreach_bytes[request.optim.name] * elements


def _partition(weights: Weights, world_size: int) -> int:
    """Elements of a rank's part: both groups are padded to whole and aligned parts."""
    total = 0
    for vectors in (True, False):
        group = sum(
            size for size, v in zip(weights.sizes, weights.is_vector, strict=True) if v == vectors
        )
        alignment = 2 * world_size
        total += -(-group // alignment) * alignment // world_size
    return total


def _zero12(request: PlanRequest, profile: Profile, like_cuda: bool) -> EngineMemory:
    weights, element = profile.weights, request.weight_bytes
    part = _partition(weights, request.world_size)
    whole = float(element * weights.trainable)
    state = OPTIMIZER_BYTES[request.optim.name] * part
    rest: Parts = {"parameters": whole + element * weights.frozen + weights.buffers}
    host: Parts = {}
    if "optimizer" in request.in_host:
        host = {"master weights": 4.0 * part, "optimizer": float(state), "gradients": 4.0 * part}
    else:
        rest |= {"master weights": 4.0 * part, "optimizer": float(state)}
    bucket = request.zero.get("reduce_bucket_size", DEFAULT_ZERO_BUCKET)
    filled = min(bucket, weights.trainable)
    comm = 0.0 if element == 4 else 4.0 * filled
    flush: Parts = {
        # The first bucket holds what it took over; it is flattened, and cast for the wire.
        "gradients": whole - element * filled,
        "engine buffers": float(element * bucket + element * filled) + comm,
    }
    step: Parts = {
        "gradients": (4.0 + element) * part,
        "optimizer temporaries": _temporaries(request, part, part, like_cuda),
    }
    if request.engine.reduce_every_micro_batch:
        # Reduced on the way, whenever the bucket is full; the own part remains.
        flush["gradients"] = float(element * part)
        copies = element * filled + comm if weights.trainable > bucket else 0.0
        remaining = element * (bucket + part) + copies
        return EngineMemory(rest, 0.0, remaining, flush=flush, step=step, host=host)
    return EngineMemory(rest, 1.0, whole, flush=flush, step=step, host=host)


def _zero3(request: PlanRequest, profile: Profile, like_cuda: bool) -> EngineMemory:
    weights, element = profile.weights, request.weight_bytes
    threshold = Rules.of(request).threshold
    large = sum(size for size in weights.sizes if size > threshold)
    small = weights.trainable - large
    part = sum(-(-size // request.world_size) for size in weights.sizes)
    whole = float(element * weights.trainable)
    bucket = request.zero.get("reduce_bucket_size", DEFAULT_ZERO_BUCKET)
    state = float(OPTIMIZER_BYTES[request.optim.name] * part)
    rest: Parts = {
        "parameters": float(element * (part + small + weights.frozen)) + weights.buffers,
        "gradients": float(element * part),
        "engine buffers": 4.0 * bucket,
        "master weights": 4.0 * part,
        "optimizer": state,
    }
    host: Parts = {}
    if "optimizer" in request.in_host:
        host = {name: rest.pop(name) for name in ("master weights", "optimizer", "gradients")}
    if "param" in request.in_host:
        host["parameters"] = float(element * part)
        rest["parameters"] -= host["parameters"]
    live = float(element * min(large, Rules.of(request).live))
    found = fetches(request, profile)
    early = float(element * max(found.encode.highest, found.backward.highest))
    largest = float(element * max(weights.sizes))
    several = request.micro_batches > 1
    # One micro-batch: the weights stay for the backward, which gives each up for its gradient.
    # Several: all are fetched early in each forward and given up one by one, but the graph of a
    # product holds its weights (not where activations are recomputed).
    held = 0.0 if request.model.activation_checkpointing else live
    gathered = (
        {"encode": 0.0, "backward": max(largest, held)}
        if several
        else {
            "encode": max(live, float(element * found.encode.last)),
            "loss": live,
            "backward": live,
        }
    )
    filled = max(ipg_buckets(weights.sizes, bucket))
    # What a bucket took over is its own; a parameter that is larger than a bucket stays outside.
    taken = element * filled if filled <= bucket else 0.0
    copies = 0.0 if element == 4 and filled > bucket else 4.0
    if not like_cuda and request.world_size > 1:
        copies += 4.0  # gloo works on one of its own
    flush: Parts = {"gradients": whole - taken, "engine buffers": copies * filled}
    if request.engine.reduce_every_micro_batch:
        whole = 4.0 * filled if weights.trainable > bucket else 0.0
        flush["gradients"] = 0.0
    step: Parts = {
        "optimizer temporaries": 4.0 * part + _temporaries(request, part, part, like_cuda),
    }
    return EngineMemory(
        rest,
        0.0,
        whole,
        weights=gathered,
        early_weights=early,
        flush=flush,
        step=step,
        host=host,
    )


def _fsdp2(request: PlanRequest, profile: Profile, like_cuda: bool) -> EngineMemory:
    weights, world_size = profile.weights, request.world_size
    compute = 4 if request.precision == "fp32" else 2
    reduce = 2 if compute == 2 and request.engine.reduce_dtype == "bf16" else 4
    units = [padded_unit(unit, world_size) for unit in weights.units]
    part = sum(units) / world_size
    state = OPTIMIZER_BYTES[request.optim.name] * part * weights.trainable / weights.total
    rest: Parts = {"parameters": 4.0 * part + weights.buffers, "optimizer": state}
    blocks, root = units[:-1] or [0], units[-1]
    host: Parts = {}
    if request.engine.cpu_offload:
        host = {"parameters": 4.0 * part, "optimizer": state, "gradients": 4.0 * part}
        rest = {"parameters": float(weights.buffers)}
    largest = max(blocks)
    live = float(compute * (root + largest))
    if not request.engine.reshard_after_forward:
        live = float(compute * sum(units))
    every, several = request.engine.reduce_every_micro_batch, request.micro_batches > 1
    whole = 4.0 * part if every else float(reduce * weights.trainable)
    step: Parts = {
        "gradients": 4.0 * part,
        "optimizer temporaries": _temporaries(
            request, part, max(weights.sizes) // world_size, like_cuda, SHARDED_FOREACH_BYTES
        ),
    }
    text = 4.0 if compute == 4 else 2.0
    unsharded = float((compute + reduce) * largest)
    weights_in = {
        "encode": live + compute * largest,
        "loss": 0.0 if request.engine.reshard_after_forward else live,
        "backward": live + compute * largest + unsharded,
    }
    if several and not every:
        weights_in["backward"] = live
    return EngineMemory(
        rest,
        0.0,
        whole,
        weights=weights_in,
        # What was gathered in one piece lies there until its parts are cut out of it and the first
        # block has been gathered as well.
        forward_begins=float(compute * 2 * (root + blocks[0])),
        backward_begins=(
            float(compute * 2 * (root + blocks[-1]))
            if request.engine.reshard_after_forward
            else live
        ),
        reduces_on_the_way=0.0 if every else reduce / compute,
        late_gradients=(0.9 * text * weights.towers["text"], float(compute * root)),
        flush={"gradients": _fsdp2_flush(request, units, compute, reduce, like_cuda)},
        step=step,
        host=host,
    )


def _fsdp2_flush(
    request: PlanRequest, units: list[int], compute: int, reduce: int, like_cuda: bool
) -> float:
    """The rest of the model is reduced last; its weights and those of blocks are gone by then."""
    root, world_size = units[-1], request.world_size
    every, several = request.engine.reduce_every_micro_batch, request.micro_batches > 1
    reduced = 4.0 * (sum(units) if every and several else sum(units[:-1])) / world_size
    own = reduce if several and not every else compute
    copied_in = own + reduce
    sent = reduce + (reduce + 4.0 * (reduce != 4)) / world_size
    if not like_cuda and world_size > 1:
        sent += reduce  # gloo works on a copy
    return reduced + root * max(copied_in, sent)
