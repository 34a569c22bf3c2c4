"""What travels in one step: collectives and bytes, by phase, for every engine and loss.

Bytes are those of whole results, as :class:`disco_ds.comm_hooks.CountingHook` counts them: what an
all-gather leaves, what a reduction takes, per rank. A ring moves ``(W - 1) / W`` of them through
every link, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.fastclip_tau import TAU_COLUMNS
from disco_ds.losses.inputs import Header
from disco_ds.losses.normaliser import LOG_U
from disco_ds.planner.fetches import Rules, fetches
from disco_ds.planner.meter import Traffic
from disco_ds.planner.profile import Profile, Weights
from disco_ds.planner.request import LossConfig, PlanRequest
from disco_ds.preemption import Requests

# DDP's own numbers: the first bucket is small, so that its reduction starts early.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
# DeepSpeed's, where the JSON says nothing; stage 0's is fixed.
DEFAULT_BUCKET, ZERO0_BUCKET = 500_000_000, 500_000_000
WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Account:
    """Collects calls and bytes."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[tuple[str, str]] = Counter()

    def add(self, phase: str, collective: str, size: float, calls: int = 1) -> None:
        """``calls`` calls that carry ``size`` bytes together."""
        if calls:
            self._bytes[phase, collective] += int(size)
            self._calls[phase, collective] += calls

    def traffic(self) -> list[Traffic]:
        """By phase and kind."""
        return [Traffic(*key, self._calls[key], self._bytes[key]) for key in sorted(self._calls)]


def step_traffic(request: PlanRequest, profile: Profile) -> list[Traffic]:
    """Collectives of one optimizer step, nothing on a single rank."""
    account = Account()
    if request.world_size > 1:
        loss_traffic(account, request, profile.dim)
        if request.model.batch_norm == "synced":
            _batch_norms(account, request, profile.weights.batch_norms)
        _ENGINES[request.strategy.partition("_")[0]](account, request, profile)
        scalars = 2 if request.loss.name == "siglip" else 1
        # The temperature's gradient, and what ranks ask of each other between two steps.
        account.add("step", "all_reduce", 4 * (scalars + len(Requests._fields)))
    return account.traffic()


def hook_traffic(request: PlanRequest, profile: Profile) -> list[Traffic]:
    """The same without the statistics of synchronised BatchNorm, which no hook sees."""
    return step_traffic(request.with_(model=replace(request.model, batch_norm="local")), profile)


# The loss: see the tables of the losses themselves.


def loss_traffic(account: Account, request: PlanRequest, dim: int) -> None:
    """Everything a loss sends, all of it in its forward."""
    loss, world_size, batch = request.loss, request.world_size, request.global_batch_size
    wire = WIRE_BYTES[loss.wire_dtype or "fp32"]
    features = wire * batch * dim
    account.add("loss", "all_gather", 8 * world_size * Header.length())
    kind = loss.gradient_reduction if isinstance(loss, DiscoConfig) else "scalar_gather"
    by_scalars = kind == "scalar_gather"
    if loss.gather == "ring":
        steps, rounds = world_size - 1, ring_rounds(loss)
        travelled = features * steps // world_size
        account.add("loss", "send_recv", travelled * rounds, steps * rounds)
    else:
        sides = 2 if by_scalars else 1
        account.add("loss", "all_gather", features * sides, sides)
    if isinstance(loss, DiscoConfig):
        account.add("loss", "all_to_all", 4 * batch)
        account.add("loss", "all_gather", 4 * (2 * batch + world_size))
        if not by_scalars:
            account.add("loss", kind, 4 * batch * dim)
    elif isinstance(loss, FastCLIPConfig):
        _fastclip(account, loss, batch)
    else:
        account.add("loss", "all_gather", 4 * world_size)


def ring_rounds(loss: LossConfig) -> int:
    """How often features of one kind go round the ring in a call."""
    if isinstance(loss, FastCLIPConfig) and loss.version == "v2":
        return 8 if loss.mode == "fastclip_compat" else 6
    return 2 if loss.name == "siglip" else 3


def _fastclip(account: Account, loss: FastCLIPConfig, batch: int) -> None:
    """Ids, what the tables know of the batch, the columns' parts, three scalars a sample."""
    account.add("loss", "all_gather", 8 * batch)
    account.add("loss", "all_reduce", 4 * (table_columns(loss) + 1) * batch)
    scalars = 3
    if loss.version == "v2":
        scalars += 2 * (loss.mode == "fastclip_compat")
        account.add("loss", "all_gather", 4 * 2 * batch)  # gradients of the temperatures
    else:
        account.add("loss", "all_to_all", 4 * batch)
    account.add("loss", "all_gather", 4 * scalars * batch)


def table_columns(loss: FastCLIPConfig) -> int:
    """Numbers that FastCLIP keeps per sample, beside its visits."""
    if loss.version != "v2":
        return len(LOG_U)
    bounds = 2 * (loss.mode == "fastclip_compat")
    return len(LOG_U) + len({*TAU_COLUMNS, "tau_image", "tau_text"}) + bounds


# The model.


def _batch_norms(account: Account, request: PlanRequest, channels: Sequence[int]) -> None:
    """Sums and squares of every BatchNorm, forward and backward."""
    size = sum(4 * (count + 1) + 4 * count for count in channels)
    micro, calls = request.micro_batches, 2 * len(channels)
    account.add("encode", "all_reduce", micro * size, micro * calls)
    passes = 1 if micro == 1 else 2 * micro
    account.add("backward", "all_reduce", passes * size, passes * calls)


# The engines.


def _ddp(account: Account, request: PlanRequest, profile: Profile) -> None:
    sizes = [4 * profile.weights.sizes[i] for i in profile.weights.order]
    account.add("backward", "all_reduce", sum(sizes), len(ddp_buckets(sizes)))


def ddp_buckets(sizes: Iterable[int]) -> list[int]:
    """Bytes of DDP's buckets: full once they reach their cap, in the order of arrival."""
    buckets, filled, cap = [], 0, FIRST_BUCKET_BYTES
    for size in sizes:
        filled += size
        if filled >= cap:
            buckets.append(filled)
            filled, cap = 0, BUCKET_BYTES
    return buckets + [filled] * (filled > 0)


def _fsdp2(account: Account, request: PlanRequest, profile: Profile) -> None:
    world_size, micro = request.world_size, request.micro_batches
    whole = [padded_unit(unit, world_size) for unit in profile.weights.units]
    weight = 4 if request.precision == "fp32" else 2
    reduce = gradient_bytes(request)
    gathers = sum(whole) * weight
    # Several micro-batches: a pass without graph each, then forward and backward. Weights that stay
    # after a forward stay until the next backward.
    forwards, backwards = 1, micro - 1
    if request.engine.reshard_after_forward:
        forwards, backwards = micro, micro if micro == 1 else 2 * micro
    account.add("encode", "all_gather", gathers * forwards, len(whole) * forwards)
    account.add("backward", "all_gather", gathers * backwards, len(whole) * backwards)
    reductions = micro if request.engine.reduce_every_micro_batch else 1
    account.add(
        "backward", "reduce_scatter", sum(whole) * reduce * reductions, len(whole) * reductions
    )
    account.add("step", "all_reduce", 8)  # the gradient norm


def padded_unit(unit: Sequence[int], world_size: int) -> int:
    """Elements of an FSDP2 unit: every parameter's rows padded to a multiple of the ranks."""
    rows, widths = unit[::2], unit[1::2]
    return sum(
        -(-row // world_size) * world_size * width for row, width in zip(rows, widths, strict=True)
    )


def _zero(account: Account, request: PlanRequest, profile: Profile) -> None:
    weights, stage = profile.weights, request.stage
    groups = [
        [n for n, v in zip(weights.sizes, weights.is_vector, strict=True) if v == vectors]
        for vectors in (True, False)
    ]
    groups = [group for group in groups if group]
    reduced = comm_bytes(request)
    if stage == 0:
        buckets = fallback_buckets(weights.sizes, ZERO0_BUCKET)
        account.add("backward", "all_reduce", reduced * weights.trainable, len(buckets))
        return
    bucket = request.zero.get("reduce_bucket_size", DEFAULT_BUCKET)
    if stage in (1, 2):
        order, times = reduction_order(request, weights)
        calls = times * len(ipg_buckets(order, bucket))
        account.add("backward", "all_reduce", reduced * weights.trainable * times, calls)
        aligned = 2 * request.world_size
        padded = sum(-(-sum(group) // aligned) * aligned for group in groups)
        account.add("step", "all_gather", request.weight_bytes * padded, len(groups))
        # Overflow flag; one norm per group.
        account.add("step", "all_reduce", 1 + 4 * len(groups), 1 + len(groups))
    else:
        _zero3(account, request, profile, groups)


def _zero3(
    account: Account, request: PlanRequest, profile: Profile, groups: list[list[int]]
) -> None:
    world_size, element = request.world_size, request.weight_bytes
    found, threshold = fetches(request, profile), Rules.of(request).threshold
    for phase, gathered in (("encode", found.encode), ("backward", found.backward)):
        account.add(phase, "all_gather", element * gathered.elements, gathered.calls)
    order = [n for group in groups for n in group]
    small = [padded_size(n, world_size) for n in profile.weights.all_sizes if n <= threshold]
    bucket = request.zero.get("reduce_bucket_size", DEFAULT_BUCKET)
    reduced = comm_bytes(request) * sum(padded_size(n, world_size) for n in order)
    order, times = reduction_order(request, profile.weights)
    calls = times * len(ipg_buckets(order, bucket))
    account.add("backward", "reduce_scatter", times * reduced, calls)
    account.add("step", "all_gather", element * sum(small), len(small))
    account.add("step", "all_reduce", 8 * len(groups), len(groups))
    if request.precision == "fp16":
        account.add("step", "all_reduce", 1)


def reduction_order(request: PlanRequest, weights: Weights) -> tuple[list[int], int]:
    """Sizes in the order in which ZeRO reduces them, and how often per step.

    Once a step, at its end: group by group. After each micro-batch: as gradients arrive.
    """
    if request.engine.reduce_every_micro_batch:
        return [weights.sizes[i] for i in weights.order], request.micro_batches
    pairs = list(zip(weights.sizes, weights.is_vector, strict=True))
    return [n for vectors in (True, False) for n, v in pairs if v == vectors], 1


def comm_bytes(request: PlanRequest) -> int:
    """Bytes of a gradient element on the wire of a DeepSpeed engine."""
    kind = request.given_ds_config.get("communication_data_type", "fp32")
    return 2 if kind in ("bf16", "fp16", "bfp16") else 4


def gradient_bytes(request: PlanRequest) -> int:
    """Bytes of a parameter gradient's element on the wire."""
    if request.stage is not None:
        return comm_bytes(request)
    half = request.precision != "fp32" and request.engine.reduce_dtype == "bf16"
    return 2 if request.strategy == "fsdp2" and half else 4


def padded_size(size: int, world_size: int) -> int:
    """Elements of a parameter, padded to whole parts."""
    return -(-size // world_size) * world_size


def fallback_buckets(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements of stage 0's buckets: closed once they exceed the limit."""
    buckets, filled = [], 0
    for size in sizes:
        filled += size
        if filled > limit:
            buckets.append(filled)
            filled = 0
    return buckets + [filled] * (filled > 0)


def ipg_buckets(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements of stage 1 to 3's buckets: closed before they would exceed the limit."""
    buckets, filled = [], 0
    for size in sizes:
        if filled and filled + size > limit:
            buckets.append(filled)
            filled = 0
        filled += size
    return buckets + [filled] * (filled > 0)


_ENGINES: dict[str, Callable[[Account, PlanRequest, Profile], None]] = {
    "single": lambda *_: None,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    **{f"zero{stage}": _zero for stage in range(4)},
}
