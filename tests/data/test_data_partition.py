"""Who reads what: pure functions over hundreds of topologies, no files and no processes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from disco_ds.data.partition import (
    EpochPlan,
    ExactPlan,
    ResampledPlan,
    Stretch,
    Topology,
    consumer_range,
    draw_chances,
    shard_order,
    window_ranges,
)

TOPOLOGIES = list(itertools.product((1, 2, 3, 4, 7, 8, 64), (1, 2, 3, 5), (1, 3, 8)))
LAYOUTS = {
    "equal": [10] * 16,
    "unequal": [10, 10, 2],
    "with empty": [0, 7, 0, 0, 31, 1, 0],
    "single": [97],
    "many": list(range(40)),
}


def walk(
    plan: EpochPlan, sizes: Sequence[int], rank: int, slot: int, position: int, count: int
) -> list[tuple[int, bool]]:
    """The next ids of a consumer, and whether each is another's."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids: list[tuple[int, bool]] = []
    windows = plan.windows(rank, slot, position)
    while len(ids) < count:
        window = next(windows)
        read = [offsets[s.shard] + p for s in window.segments for p in range(s.start, s.stop)]
        assert sorted(window.order) == list(range(len(read)))
        ids += [(int(read[i]), window.repeated) for i in window.order]
    return ids[:count]


def quota(num_steps: int, topology: Topology, slot: int) -> int:
    return len(range(slot, num_steps, topology.num_slots)) * topology.local_batch_size


def epoch_ids(plan: EpochPlan, sizes: Sequence[int], topology: Topology) -> list[int]:
    ids = []
    for rank, slot in itertools.product(range(topology.world_size), range(topology.num_slots)):
        part = walk(plan, sizes, rank, slot, 0, quota(plan.num_steps, topology, slot))
        assert not any(repeated for _, repeated in part)
        ids += [i for i, _ in part]
    return ids


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_topology_is_exact(layout: str) -> None:
    sizes = LAYOUTS[layout]
    for ranks, slots, batch in TOPOLOGIES:
        topology = Topology(ranks, slots, batch, window=6)
        plan = ExactPlan(sizes, seed=1, epoch=2, topology=topology)
        ids = epoch_ids(plan, sizes, topology)
        assert plan.num_steps == sum(sizes) // (ranks * batch)
        assert len(set(ids)) == len(ids) == plan.num_steps * ranks * batch
        assert sum(sizes) - len(ids) < ranks * batch


def test_parts_tile_the_line_and_ranks_are_level() -> None:
    for ranks, slots, batch in TOPOLOGIES:
        topology = Topology(ranks, slots, batch, window=6)
        for total in (0, 1, 97, 1000):
            consumers = itertools.product(range(ranks), range(slots))
            parts = [consumer_range(total, topology, rank, slot) for rank, slot in consumers]
            assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])]
            assert parts[-1][1] == total
            of_rank = [parts[r * slots + slots - 1][1] - parts[r * slots][0] for r in range(ranks)]
            assert max(of_rank) - min(of_rank) <= 1


def test_whole_shards_go_to_one_consumer_when_they_divide_evenly() -> None:
    """P-15."""
    topology = Topology(world_size=2, num_slots=2, local_batch_size=5, window=7)
    owners: dict[int, set[tuple[int, int]]] = {}
    plan = ExactPlan([10] * 8, seed=0, epoch=0, topology=topology)
    for rank, slot in itertools.product(range(2), range(2)):
        for i, _ in walk(plan, [10] * 8, rank, slot, 0, 20):
            owners.setdefault(i // 10, set()).add((rank, slot))
    assert sorted(owners) == list(range(8))
    assert all(len(of_shard) == 1 for of_shard in owners.values())


def test_order_is_one_for_all_ranks_and_differs_per_epoch_and_seed() -> None:
    orders = {tuple(shard_order(20, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert (shard_order(20, 1, 1) == shard_order(20, 1, 1)).all()


def test_reading_on_goes_round_the_line_before_it_comes_back() -> None:
    sizes = [5, 9, 4]
    topology = Topology(2, 1, 3, window=4)
    plan = ExactPlan(sizes, seed=1, epoch=0, topology=topology)
    for rank in range(2):
        ids = walk(plan, sizes, rank, 0, 0, 18)
        assert sorted(i for i, _ in ids) == list(range(18))
        assert [repeated for _, repeated in ids] == [False] * 9 + [True] * 9


def test_windows_grow_to_their_size() -> None:
    lengths = [stop - start for start, stop in window_ranges(10, 210, 64)]
    assert lengths == [8, 16, 32, 64, 64, 16]
    assert [b - a for a, b in window_ranges(0, 5, 1)] == [1] * 5


def test_any_position_continues_the_same_order() -> None:
    rng = random.Random(0)
    for layout, topology in itertools.product(
        LAYOUTS.values(), (Topology(1, 1, 1, 16), Topology(2, 3, 2, 5))
    ):
        plan = ExactPlan(layout, seed=4, epoch=1, topology=topology)
        for _ in range(10):
            rank, slot = rng.randrange(topology.world_size), rng.randrange(topology.num_slots)
            whole = walk(plan, layout, rank, slot, 0, 60)
            cut = rng.randrange(60)
            assert walk(plan, layout, rank, slot, cut, 60 - cut) == whole[cut:]


def test_nothing_behind_a_position_is_read() -> None:
    """The segments of the resumed windows hold exactly the samples still to come."""
    sizes = [10] * 6
    plan = ExactPlan(sizes, seed=4, epoch=1, topology=Topology(1, 1, 1, 16))
    for position in range(60):
        segments = [
            segment
            for window in itertools.takewhile(
                lambda w: not w.repeated, plan.windows(0, 0, position)
            )
            for segment in window.segments
        ]
        assert sum(s.stop - s.start for s in segments) == 60 - position


def test_topology_changes_inside_an_epoch_never_repeat() -> None:
    """A chain of up to four topologies, each stopped at a random step."""
    rng = random.Random(1)
    for trial in range(60):
        sizes = [rng.randrange(30) for _ in range(rng.randrange(1, 12))]
        history: tuple[Stretch, ...] = ()
        seen: list[int] = []
        for _ in range(4):
            topology = Topology(
                *(rng.randrange(1, 5) for _ in range(3)), window=rng.randrange(1, 20)
            )
            plan = ExactPlan(sizes, seed=trial, epoch=0, topology=topology, history=history)
            steps = rng.randrange(plan.num_steps + 1)
            positions = []
            for rank, slot in itertools.product(
                range(topology.world_size), range(topology.num_slots)
            ):
                positions.append(quota(steps, topology, slot))
                seen += [i for i, _ in walk(plan, sizes, rank, slot, 0, positions[-1])]
            history = (*history, Stretch(topology, tuple(positions)))
            assert plan.num_samples_before + plan.num_steps * topology.world_size <= sum(sizes)
        assert len(set(seen)) == len(seen)
        last = Topology(1, 1, 1, 4)
        plan = ExactPlan(sizes, seed=trial, epoch=0, topology=last, history=history)
        rest = [i for i, _ in walk(plan, sizes, 0, 0, 0, plan.num_steps)]
        assert sorted(seen + rest) == list(range(sum(sizes)))


def test_resampled_streams_differ_by_consumer_and_epoch_and_repeat_by_seed() -> None:
    """P-26: 50 shards, 2 ranks x 2 workers, two epochs, the same seed twice."""
    sizes = [4] * 50
    topology = Topology(2, 2, 4, window=8)

    def stream(seed: int, epoch: int, rank: int, slot: int) -> tuple[int, ...]:
        plan = ResampledPlan(
            sizes, seed=seed, epoch=epoch, topology=topology, chances=[1 / 50] * 50
        )
        return tuple(i for i, _ in walk(plan, sizes, rank, slot, 0, 100))

    keys = list(itertools.product((1, 2), (0, 1), (0, 1), (0, 1)))
    assert len({stream(*key) for key in keys}) == len(keys)
    assert all(stream(*key) == stream(*key) for key in keys)


def test_weights_are_shares_of_samples() -> None:
    """Three sources of different shard sizes; the largest one has weight 0."""
    sizes, sources = [30] * 10 + [5] * 4 + [90] * 3 + [0], [0] * 10 + [1] * 4 + [2] * 3 + [1]
    chances = draw_chances(sizes, sources, (3.0, 1.0, 0.0))
    plan = ResampledPlan(sizes, seed=0, epoch=0, topology=Topology(1, 1, 1, 64), chances=chances)
    ids = np.array([i for i, _ in walk(plan, sizes, 0, 0, 0, 20_000)])
    assert abs((ids < 300).mean() - 0.75) < 0.03
    assert ((ids >= 300) & (ids < 320)).mean() == pytest.approx(0.25, abs=0.03)
    assert (ids < 320).all()


@pytest.mark.parametrize("weights", [(1.0, 9.0), (0.0, 9.0)])
def test_a_weight_for_a_source_without_samples_is_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"gives 9 to entry 2 of data\.shards, which holds no"):
        draw_chances([3, 0], [0, 1], weights)
