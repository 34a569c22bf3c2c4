"""The position of a stream, between objects and the plain values that checkpoints hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disco_ds.data.partition import Stretch, Topology

STATE_FORMAT = 1
ALL_RANKS = -1
_COUNT = "count/"
State = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """Where a rank is: the batches handed out so far, and the consumers' positions after them."""

    epoch: int
    step: int
    """Batches of the epoch that were handed out, under the present topology."""
    positions: tuple[int, ...]
    """One per slot of the rank, or of all ranks, rank by rank."""


@dataclass(frozen=True)
class LoaderState:
    """Everything that :meth:`TrainLoader.state_dict` says."""

    fingerprint: str
    mode: str
    seed: int
    rank: int
    """Whose positions these are; ``ALL_RANKS``: everybody's."""
    topology: Topology
    position: Position
    history: tuple[Stretch, ...]
    """What other topologies consumed of the epoch before."""
    num_samples_before: int
    counts: Mapping[str, int]

    @property
    def is_complete(self) -> bool:
        """The positions of all ranks are here."""
        return self.rank == ALL_RANKS or self.topology.world_size == 1

    def to_plain(self) -> State:
        """Numbers, texts and lists of numbers."""
        return {
            "format": STATE_FORMAT,
            "fingerprint": self.fingerprint,
            "mode": self.mode,
            "seed": self.seed,
            "rank": self.rank,
            "epoch": self.position.epoch,
            "step": self.position.step,
            "topology": _pack(self.topology),
            "positions": list(self.position.positions),
            "history": [n for s in self.history for n in (*_pack(s.topology), *s.positions)],
            "num_samples_before": self.num_samples_before,
            **{f"{_COUNT}{name}": count for name, count in sorted(self.counts.items())},
        }

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> LoaderState:
        """Read what :meth:`to_plain` wrote.

        Raises:
            ValueError: it is something else.
        """
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"data position of format {state.get('format')}, not {STATE_FORMAT}")
        return cls(
            fingerprint=str(state["fingerprint"]),
            mode=str(state["mode"]),
            seed=int(state["seed"]),
            rank=int(state["rank"]),
            topology=_unpack(state["topology"]),
            position=Position(
                int(state["epoch"]), int(state["step"]), tuple(int(p) for p in state["positions"])
            ),
            history=_unpack_history(state["history"]),
            num_samples_before=int(state["num_samples_before"]),
            counts={
                name.removeprefix(_COUNT): int(count)
                for name, count in state.items()
                if name.startswith(_COUNT)
            },
        )

    def check(self, *, fingerprint: str, mode: str, seed: int) -> None:
        """Refuse a position in another stream.

        Raises:
            ValueError: names what differs.
        """
        pairs = {
            "--data.shards (fingerprint)": (self.fingerprint, fingerprint),
            "--data.mode": (self.mode, mode),
            "--seed": (self.seed, seed),
        }
        for name, (then, now) in pairs.items():
            if then != now:
                raise ValueError(
                    f"cannot resume inside the epoch: {name} was {then}, now it is {now}. Go on "
                    "with the former, or start anew from the weights with --model.init"
                )


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """One state, good for any rank of any topology, from the states of all ranks.

    Raises:
        ValueError: they are not the states of all ranks after one step.
    """
    ordered = sorted(states, key=lambda state: int(state["rank"]))
    first = ordered[0]
    common = ("fingerprint", "mode", "seed", "epoch", "step", "topology", "history")
    all_ranks = list(range(first["topology"][0]))
    if [state["rank"] for state in ordered] != all_ranks or any(
        state[name] != first[name] for state in ordered for name in common
    ):
        raise ValueError("these are not the states of all ranks at one step")
    counts: Counter[str] = Counter()
    for state in ordered:
        counts.update({n: int(count) for n, count in state.items() if n.startswith(_COUNT)})
    positions = [position for state in ordered for position in state["positions"]]
    kept = {name: value for name, value in first.items() if not name.startswith(_COUNT)}
    return {**kept, "rank": ALL_RANKS, "positions": positions, **dict(sorted(counts.items()))}


def _pack(topology: Topology) -> list[int]:
    return [
        topology.world_size,
        topology.num_slots,
        topology.local_batch_size,
        topology.window,
    ]


def _unpack(numbers: Sequence[int]) -> Topology:
    return Topology(*(int(number) for number in numbers))


def _unpack_history(numbers: Sequence[int]) -> tuple[Stretch, ...]:
    stretches, rest = [], [int(number) for number in numbers]
    while rest:
        topology = _unpack(rest[:4])
        end = 4 + topology.world_size * topology.num_slots
        stretches.append(Stretch(topology, tuple(rest[4:end])))
        rest = rest[end:]
    return tuple(stretches)
