"""What ZeRO stage 3 gathers and when: its coordinator, replayed on sizes alone.

DeepSpeed remembers the order in which modules used parameters during a forward and backward. From
then on it fetches what a module lacks in one all-gather and what follows, up to the prefetch bucket
and the number of live parameters, in another; it gives up what the next ``max_reuse_distance``
elements do not use. Small parameters stay. Every forward begins that order anew: what was
fetched ahead of a backward that does not come is thrown away. What a module gives up is decided
once per place in the order, and the decision stays when a longer order replaces the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from disco_ds.planner.profile import Profile
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.uses import Event, Uses

PREFETCH_BUCKET, PERSISTENCE_THRESHOLD = 50_000_000, 100_000
MAX_LIVE_PARAMETERS = MAX_REUSE_DISTANCE = 1_000_000_000
# Passes of a step are alike from the third on; the first two steps are still finding the order.
ALIKE, SETTLING_STEPS = 4, 2


@dataclass(frozen=True)
class Rules:
    """Numbers of the DeepSpeed JSON, in elements."""

    bucket: int
    live: int
    reuse: int
    threshold: int

    @classmethod
    def of(cls, request: PlanRequest) -> Rules:
        """Those of a request, DeepSpeed's own where its JSON says nothing."""
        zero = request.zero
        return cls(
            bucket=int(zero.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET)),
            live=int(zero.get("stage3_max_live_parameters", MAX_LIVE_PARAMETERS)),
            reuse=int(zero.get("stage3_max_reuse_distance", MAX_REUSE_DISTANCE)),
            threshold=int(zero.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)),
        )


@dataclass
class Gathered:
    """All-gathers of one phase of a step."""

    calls: int = 0
    elements: int = 0
    """Elements of whole parameters, padded to whole parts."""
    highest: int = 0
    """Elements of large parameters and of gathered pieces that lie there together at most."""

    last: int = 0
    """The same as the last of them arrive."""

    def plus(self, other: Gathered, times: int) -> Gathered:
        """This and another, so often."""
        return Gathered(
            self.calls + times * other.calls,
            self.elements + times * other.elements,
            max(self.highest, other.highest),
            other.last,
        )


@dataclass(frozen=True)
class Fetches:
    """What a step gathers while it encodes, and in its backward phase."""

    encode: Gathered
    backward: Gathered


def fetches(request: PlanRequest, profile: Profile) -> Fetches:
    """All-gathers of a step of ZeRO stage 3."""
    sizes, rules = profile.weights.all_sizes, Rules.of(request)
    micro = request.micro_batches
    known = _fetches(profile.uses, sizes, rules, request.world_size, min(micro, ALIKE))
    if micro <= ALIKE:
        return known
    before = _fetches(profile.uses, sizes, rules, request.world_size, ALIKE - 1)
    more = micro - ALIKE

    def extended(last: Gathered, former: Gathered) -> Gathered:
        return last.plus(last, more).plus(former, -more)

    return Fetches(extended(known.encode, before.encode), extended(known.backward, before.backward))


@lru_cache(maxsize=256)
def _fetches(
    uses: Uses, sizes: tuple[int, ...], rules: Rules, world_size: int, micro: int
) -> Fetches:
    padded = [-(-size // world_size) * world_size for size in sizes]
    coordinator = _Coordinator(uses.parameters, sizes, padded, rules)
    for _ in range(SETTLING_STEPS):
        _step(coordinator, uses, micro)
    return _step(coordinator, uses, micro)


def _step(coordinator: _Coordinator, uses: Uses, micro: int) -> Fetches:
    """One optimizer step: a single pass, or passes without graph before those with one."""
    if micro == 1:
        turn = next(i for i, (kind, _) in enumerate(uses.training) if kind == "back")
        encode = coordinator.run(uses.training[:turn], is_forward=True)
        backward = coordinator.run(uses.training[turn:], is_forward=False)
    else:
        encode, backward = Gathered(), Gathered()
        for _ in range(micro):
            encode = encode.plus(coordinator.run(uses.forward, is_forward=True), 1)
        for _ in range(micro):
            backward = backward.plus(coordinator.run(uses.training, is_forward=True), 1)
    coordinator.end_step()
    return Fetches(encode, backward)


State = Literal["away", "in flight", "here"]


@dataclass
class _Flight:
    """Parameters that travel in one piece; it lies there until all of them were waited for."""

    parameters: list[int]
    piece: int
    waiting: int


@dataclass
class _Order:
    """Modules in the order of their fetches, and questions about what comes next."""

    modules: list[int] = field(default_factory=list)
    traversed: list[int] = field(default_factory=list)
    """Elements used before each place, and by all."""
    places: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Where each parameter is used."""

    def freeze(self, parameters: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        """The order is complete."""
        self.traversed = [
            0,
            *accumulate(sum(sizes[p] for p in parameters[module]) for module in self.modules),
        ]
        for place, module in enumerate(self.modules):
            for parameter in parameters[module]:
                self.places[parameter].append(place)

    def reuses(self, parameter: int, place: int, distance: int) -> bool:
        """Whether a parameter occurs again before so many elements."""
        places = self.places[parameter]
        following = bisect_left(places, place)
        if following == len(places):
            return False
        return self.traversed[places[following]] - self.traversed[place] < distance


class _Coordinator:
    def __init__(
        self,
        parameters: Sequence[Sequence[int]],
        sizes: Sequence[int],
        padded: Sequence[int],
        rules: Rules,
    ) -> None:
        self._parameters, self._sizes, self._padded, self._rules = parameters, sizes, padded, rules
        self._persistent = {i for i, size in enumerate(sizes) if size <= rules.threshold}
        self._state: list[State] = ["away"] * len(sizes)
        for parameter in self._persistent:
            self._state[parameter] = "here"
        self._registry: dict[int, _Flight] = {}
        self._pieces = self._whole = 0
        self._users: dict[int, set[int]] = defaultdict(set)
        self._coming_back: dict[int, None] = {}
        self._mode: Literal["invalid", "recording", "complete"] = "invalid"
        self._order = _Order()
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_until: dict[int, int] = {}
        self._decided: dict[tuple[int, int], set[int]] = {}
        self._place = self._live = 0
        self._gathered = Gathered()

    def run(self, events: Sequence[Event], *, is_forward: bool) -> Gathered:
        """Play (the first or the second half of) a pass; returns what it gathered."""
        self._gathered = Gathered()
        if is_forward:
            self._reset()
        for kind, module in events:
            if kind in ("begin", "back"):
                self._check_order(module)
                if self._mode == "recording":
                    self._order.modules.append(module)
                if kind == "back":
                    self._coming_back[module] = None
                self._fetch(module)
            else:
                if kind == "done":
                    self._coming_back.pop(module, None)
                self._release(module)
        if any(kind == "back" for kind, _ in events):
            self._release_leftovers()
        return self._gathered

    def end_step(self) -> None:
        """The optimizer writes the shards, and small parameters are gathered again."""
        self._registry.clear()
        self._users.clear()
        self._pieces = self._whole = 0
        for parameter in range(len(self._sizes)):
            self._state[parameter] = "here" if parameter in self._persistent else "away"

    def _reset(self) -> None:
        """A forward of the whole model begins."""
        self._drop_flights()
        if self._mode == "recording":
            self._order.freeze(self._parameters, self._sizes)
            self._mode = "complete"
        elif self._mode == "invalid":
            self._mode = "recording"
        self._queue = deque(
            (parameter, place)
            for place, module in enumerate(self._order.modules)
            for parameter in self._parameters[module]
        )
        self._fetched_until = {}
        self._place = self._live = 0

    def _check_order(self, module: int) -> None:
        if self._mode != "complete":
            return
        expected = self._order.modules[self._place : self._place + 1]
        if expected != [module]:
            self._mode, self._order, self._queue = "invalid", _Order(), deque()
            self._fetched_until = {}
            self._drop_flights()

    def _fetch(self, module: int) -> None:
        needed = self._parameters[module]
        self._gather([p for p in needed if self._state[p] == "away"])
        for parameter in needed:
            self._users[parameter].add(module)
            self._wait(parameter)
        if self._mode == "complete":
            self._pass_by(needed)
            if self._rules.bucket > 0:
                self._prefetch()
        self._place += 1

    def _pass_by(self, needed: Sequence[int]) -> None:
        """Take off the queue what this module uses, unless a prefetch has done so."""
        ahead = {p for p in needed if self._fetched_until.get(p, -1) < self._place}
        passed: set[int] = set()
        while self._queue and len(passed) < len(ahead):
            parameter, place = self._queue.popleft()
            self._fetched_until[parameter] = place
            passed.add(parameter)

    def _prefetch(self) -> None:
        room = min(self._rules.live - self._live, self._rules.bucket)
        chosen: dict[int, None] = {}
        filled = 0
        while self._queue and filled < room:
            parameter, place = self._queue.popleft()
            if self._state[parameter] == "away" and parameter not in chosen:
                chosen[parameter] = None
                filled += self._sizes[parameter]
            self._fetched_until[parameter] = max(self._fetched_until.get(parameter, -1), place)
        self._gather(list(chosen))

    def _gather(self, parameters: list[int]) -> None:
        if not parameters:
            return
        self._live += sum(self._sizes[p] for p in parameters)
        self._gathered.calls += 1
        self._gathered.elements += sum(self._padded[p] for p in parameters)
        piece = sum(self._padded[p] for p in parameters)
        flight = _Flight(parameters, piece, len(parameters))
        self._pieces += piece
        for parameter in parameters:
            self._state[parameter] = "in flight"
            self._registry[parameter] = flight
        self._look()

    def _wait(self, parameter: int) -> None:
        """What travels together arrives together; one that travels alone arrives where it stays."""
        flight = self._registry.pop(parameter, None)
        if flight is None:
            return
        if len(flight.parameters) == 1:
            self._pieces -= flight.piece
        for arrived in flight.parameters:
            if self._state[arrived] == "in flight":
                self._state[arrived] = "here"
                self._whole += self._sizes[arrived]
        self._look()
        self._gathered.last = self._pieces + self._whole
        flight.waiting -= 1
        if flight.waiting == 0 and len(flight.parameters) > 1:
            self._pieces -= flight.piece

    def _look(self) -> None:
        self._gathered.highest = max(self._gathered.highest, self._pieces + self._whole)

    def _release(self, module: int) -> None:
        needed = self._parameters[module]
        given_up = self._given_up(module) if self._mode == "complete" else set(needed)
        for parameter in needed:
            self._users[parameter].discard(module)
            if parameter in given_up:
                self._give_up(parameter)

    def _given_up(self, module: int) -> set[int]:
        key = (module, self._place)
        if key not in self._decided:
            self._decided[key] = {
                p
                for p in self._parameters[module]
                if p not in self._persistent
                and self._fetched_until.get(p, -1) <= self._place
                and not self._order.reuses(p, self._place, self._rules.reuse)
            }
        return self._decided[key]

    def _give_up(self, parameter: int) -> None:
        if self._state[parameter] == "here" and not self._users[parameter]:
            self._state[parameter] = "away"
            self._live -= self._sizes[parameter]
            self._whole -= self._sizes[parameter]

    def _drop_flights(self) -> None:
        for parameter in list(self._registry):
            self._wait(parameter)
            self._give_up(parameter)
        self._registry.clear()

    def _release_leftovers(self) -> None:
        """Modules whose inputs have no gradient: nothing tells that they are done."""
        for module in reversed(self._coming_back):
            for parameter in self._parameters[module]:
                self._users[parameter].discard(module)
                if parameter not in self._persistent:
                    self._give_up(parameter)
        self._coming_back.clear()
