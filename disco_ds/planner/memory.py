"""Closed forms of a rank's memory: what lies there between steps, and the peak of every phase.

All numbers are bytes of live tensors on the device, as :mod:`disco_ds.planner.trace` counts them;
the allocator's slack and the CUDA context are added by :mod:`disco_ds.planner.verdict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from disco_ds.losses.disco import KEPT_TILES_BYTES, DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.pairwise import CPU_TILE_SIZE, GPU_TILE_SIZE
from disco_ds.planner.comm import WIRE_BYTES, table_columns
from disco_ds.planner.engine_memory import EngineMemory, engine_memory
from disco_ds.planner.profile import Profile
from disco_ds.planner.request import PlanRequest

Parts = dict[str, float]


@dataclass(frozen=True)
class Memory:
    """Bytes by part: between steps, and where each phase is highest."""

    at_rest: Parts
    phases: dict[str, Parts]
    host: Parts = field(default_factory=dict)
    """In host memory: offloaded state and FastCLIP's tables."""

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> float:
        """Bytes at the peak."""
        return sum(self.phases[self.peak_phase].values())


def step_memory(request: PlanRequest, profile: Profile, *, like_cuda: bool = True) -> Memory:
    """Memory of one step of a rank (rank 0, which is never smaller than the others)."""
    engine = engine_memory(request, profile, like_cuda=like_cuda)
    rest = dict(engine.at_rest)
    rest["inputs"] = input_bytes(request, profile)
    loss = loss_memory(request, profile.dim, like_cuda=like_cuda)
    tables = table_bytes(request)
    on_device = isinstance(request.loss, FastCLIPConfig) and request.loss.tables == "device"
    if on_device and tables:
        rest["estimator tables"] = tables
    phases = {
        "encode": _largest(
            _sum(rest, _encode(request, profile, engine)),
            _sum(rest, {"gathered weights": engine.forward_begins}),
        ),
        "loss": _sum(rest, _during_loss(request, profile, engine), {"loss tiles": loss}),
        "backward": _largest(
            _sum(rest, _backward(request, profile, engine)),
            _sum(rest, _backward_begins(request, profile, engine)),
            _sum(rest, engine.flush),
        ),
        "step": _sum(rest, engine.step),
    }
    host = dict(engine.host)
    if tables and not on_device:
        host["estimator tables"] = tables
    return Memory(rest, phases, host)


def _sum(*parts: Mapping[str, float]) -> Parts:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)  # type: ignore[arg-type, unused-ignore]
    return {name: float(value) for name, value in total.items() if value}


def _largest(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def input_bytes(request: PlanRequest, profile: Profile) -> float:
    """Images in fp32, tokens and ids in int64."""
    height, width = profile.image_size
    return request.local_batch_size * (4 * 3 * height * width + 8 * profile.context + 8)


def _activations(profile: Profile, total: float, size: float) -> Parts:
    """Split what the towers hold in proportion to what they keep for the backward pass."""
    kept = {name: max(line.at(size), 0.0) for name, line in profile.kept.items()}
    whole = sum(kept.values()) or 1.0
    return {f"activations, {name}": total * value / whole for name, value in kept.items()}


def _feature_bytes(request: PlanRequest, profile: Profile, element: int) -> float:
    return 2.0 * request.local_batch_size * profile.dim * element


def _encode(request: PlanRequest, profile: Profile, engine: EngineMemory) -> Parts:
    size = request.micro_batch
    if request.micro_batches == 1:
        total = profile.forward.peak(size)
        early = _early(request, profile, engine)
        if early[0] > total + sum(engine.gathered("encode").values()):
            return _sum(
                _activations(profile, early[1], size), {"gathered weights": engine.early_weights}
            )
        return _sum(_activations(profile, total, size), engine.gathered("encode"))
    total = profile.forward_no_graph.peak(size)
    weights = engine.gathered("encode")
    if engine.early_weights:
        weights = {"gathered weights": engine.early_weights}
    features = _feature_bytes(request, profile, profile.feature_bytes)
    if 2 * features > total + features:  # where the parts are put together
        total = 0.0
        features *= 2
    return _sum(_activations(profile, total, size), {"features": features}, weights)


def _early(request: PlanRequest, profile: Profile, engine: EngineMemory) -> tuple[float, float]:
    """Bytes early in a forward, and the activations among them: those of a few layers."""
    working = profile.forward_no_graph.peak(request.micro_batch)
    return engine.early_weights and engine.early_weights + working, working


def _kept(request: PlanRequest, profile: Profile) -> Parts:
    """Activations of a micro-batch between its forward and its backward, without its features."""
    size = request.micro_batch
    features = 2.0 * size * profile.dim * profile.feature_bytes
    total = sum(line.at(size) for line in profile.kept.values()) - features
    return _activations(profile, max(total, 0.0), size)


def _during_loss(request: PlanRequest, profile: Profile, engine: EngineMemory) -> Parts:
    features = _feature_bytes(request, profile, profile.feature_bytes)
    kept = _kept(request, profile) if request.micro_batches == 1 else {}
    leaves = 0.0 if profile.feature_bytes == 4 else _feature_bytes(request, profile, 4)
    return _sum(kept, {"features": features + leaves}, engine.gathered("loss"))


def _backward(request: PlanRequest, profile: Profile, engine: EngineMemory) -> Parts:
    """Gradients of features are there; gradients of weights come as activations go."""
    size, several = request.micro_batch, request.micro_batches > 1
    features = _feature_bytes(request, profile, 4)
    gathered = engine.gathered("backward")
    activations, gradients = _highest_moment(request, profile, engine)
    if several:
        whole = engine.accumulated
        if (forward := profile.forward.peak(size)) + whole > activations + gradients:
            activations, gradients = forward, whole
        early = _early(request, profile, engine)
        if early[0] + whole > activations + gradients + sum(gathered.values()):
            activations, gradients = early[1], whole
            gathered = {"gathered weights": engine.early_weights}
        features += _feature_bytes(request, profile, profile.feature_bytes)
    return _sum(
        _activations(profile, activations, size),
        {"gradients": gradients, "features": features},
        gathered,
    )


def _backward_begins(request: PlanRequest, profile: Profile, engine: EngineMemory) -> Parts:
    """All activations of a micro-batch, and the weights that are gathered to begin with."""
    several = request.micro_batches > 1
    others = {
        "gradients": engine.accumulated if several else 0.0,
        "features": _feature_bytes(request, profile, 4),
    }
    return _largest(
        _sum(_kept(request, profile), others, {"gathered weights": engine.backward_begins}),
        # A later micro-batch begins with its forward.
        _sum(others, {"gathered weights": engine.forward_begins}) if several else {},
    )


def _highest_moment(
    request: PlanRequest, profile: Profile, engine: EngineMemory
) -> tuple[float, float]:
    """Activations, and gradients beside them, where a backward is highest."""
    best = (0.0, 0.0)
    begins, late = engine.late_gradients
    for line, made in profile.backward.moments:
        gradients = _gradients_at(request, engine, made) + (late if made >= begins else 0.0)
        best = max(best, (line.at(request.micro_batch), gradients), key=sum)
    return best


def _gradients_at(request: PlanRequest, engine: EngineMemory, made: float) -> float:
    """Gradients that lie there in the worst micro-batch once ``made`` of its own exist."""
    if request.micro_batches == 1:
        return made * engine.gradient_share
    whole = engine.accumulated
    if request.micro_batches > 2 or not engine.reduces_on_the_way:
        return whole
    # The first micro-batch builds them up; the last one gives up those of blocks.
    begins, late = engine.late_gradients
    own = made * engine.reduces_on_the_way
    stays = late * engine.reduces_on_the_way if made >= begins else 0.0
    return max(min(own, whole), whole - own + stays)


def loss_memory(request: PlanRequest, dim: int, *, like_cuda: bool) -> float:
    """What a call of the loss allocates at its peak, beyond its arguments.

    The normalised features and their saved copies, gathered features, gradients, tiles, and
    scalars per sample (fp32 and float64).
    """
    loss, batch = request.loss, request.global_batch_size
    local, world_size = request.local_batch_size, request.world_size
    wire = WIRE_BYTES[loss.wire_dtype or "fp32"]
    sides = 2
    own = 4.0 * local * dim
    normalised = 2 * own
    sent = 0.0 if wire == 4 else 2.0 * local * dim * wire
    gathered = 0.0
    by_scalars = not isinstance(loss, DiscoConfig) or loss.gradient_reduction == "scalar_gather"
    if world_size > 1:
        if loss.gather == "ring":
            gathered = 2 * 2.0 * local * dim * wire
        else:
            gathered = float((sides if by_scalars else 1) * batch * dim * wire)
    gradients = 2 * own if by_scalars else own + 4.0 * batch * dim
    default = GPU_TILE_SIZE if like_cuda else CPU_TILE_SIZE
    side = min(loss.tile_size or default, local)
    tiles = 2 * 4.0 * side * side
    if wire != 4:
        tiles += 2 * 4.0 * side * dim
    if isinstance(loss, DiscoConfig) and loss.tile_size is None:
        tiles += _kept_tiles(local, batch, side)
    scalars = 28.0 * batch
    return normalised + sent + gathered + gradients + tiles + scalars


def _kept_tiles(local: int, batch: int, side: int) -> float:
    """Tiles kept from the first pass for the second."""
    all_tiles = 4.0 * local * batch
    tile = 4.0 * side * side
    return min(all_tiles, KEPT_TILES_BYTES // tile * tile if tile <= KEPT_TILES_BYTES else 0.0)


# Bytes per logit at the peak of the peers' losses, from published memory: open_clip with local
# loss, whose two [b, B] blocks DisCo-CLIP has as well, and the plain loss with [B, B] on every rank
# (Inf-CLIP, arXiv 2410.17243, table of loss memory: 2.27 GB and 16.67 GB at 32k on 8 GPUs).
BYTES_PER_LOCAL_LOGIT, BYTES_PER_GLOBAL_LOGIT = 17.0, 15.5


def peer_loss_memory(kind: str, local: int, world_size: int, dim: int) -> float:
    """Bytes of another project's loss at its peak: ``disco_clip`` or ``open_clip`` (its default).

    Logits at the published rates, features gathered in fp32, and their gradients.
    """
    batch = local * world_size
    logits = {
        "disco_clip": BYTES_PER_LOCAL_LOGIT * local * batch,
        "open_clip": BYTES_PER_GLOBAL_LOGIT * batch * batch,
    }[kind]
    return logits + 2 * 2 * 4.0 * batch * dim


def table_bytes(request: PlanRequest) -> float:
    """FastCLIP's per-sample tables of one rank."""
    if not isinstance(request.loss, FastCLIPConfig):
        return 0.0
    columns = table_columns(request.loss) + 1
    return 4.0 * columns * -(-request.num_samples // request.world_size)
