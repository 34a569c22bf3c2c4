"""How often ZeRO stage 3 gathers weights: its prefetcher, on sizes alone.

DeepSpeed remembers in which order modules used which parameters. On the way forward it fetches what
the current module lacks in one all-gather, and what follows, up to the prefetch bucket, in another;
on the way back after a step's later micro-batches each module fetches for itself. Small parameters
stay whole. A parameter that a module uses without owning it is fetched by the user.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from disco_ds.planner.profile import Profile
from disco_ds.planner.request import PlanRequest

PREFETCH_BUCKET, PERSISTENCE_THRESHOLD = 50_000_000, 100_000


@dataclass(frozen=True)
class Fetches:
    """All-gathers of one forward and of one backward."""

    forward: int
    backward: int


def fetch_calls(request: PlanRequest, profile: Profile) -> Fetches:
    """Count the all-gathers of a micro-batch."""
    zero, sizes = request.zero, profile.weights.all_sizes
    threshold = zero.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
    bucket = zero.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET)
    large = {i for i, size in enumerate(sizes) if size > threshold}
    uses = profile.uses
    return Fetches(
        forward=_forward(uses.forward, sizes, large, bucket),
        backward=_backward(uses.backward, uses.borrowed, large),
    )


def _forward(
    visits: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], large: set[int], bucket: int
) -> int:
    queue = deque(i for visit in visits for i in visit)
    here: set[int] = set()
    passed: set[int] = set()
    calls = 0
    for visit in visits:
        needed = {i for i in visit if i in large} - here
        calls += bool(needed)
        here |= needed
        for i in visit:
            if i not in passed and queue:
                passed.add(queue.popleft())
        ahead: set[int] = set()
        while queue and sum(sizes[i] for i in ahead) < bucket:
            following = queue.popleft()
            passed.add(following)
            if following in large and following not in here:
                ahead.add(following)
        calls += bool(ahead)
        here |= ahead
    return calls


def _backward(
    visits: tuple[tuple[int, ...], ...], borrowed: frozenset[int], large: set[int]
) -> int:
    here: set[int] = set()
    calls = 0
    for visit in visits:
        needed = {i for i in visit if i in large} - here
        calls += bool(needed)
        here |= needed & borrowed
    return calls
