"""Per-sample tables, split over ranks: sample ``i`` belongs to rank ``i % W``.

FastCLIP keeps a few numbers for every sample of the data set. A rank holds ``1/W`` of them plus
what a batch needs; one small collective per step brings a batch's values to all ranks. A result
never depends on which rank draws a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

VISITS = "visits"
# Local slots are added in blocks of this many when an unknown id arrives.
GROWTH = 4096
# Of a growing table: beyond it, ids are hashes rather than numbers of samples.
HIGHEST_ID = 10**10


class SampleState:
    """Columns of numbers by sample id; reading is collective, writing is local.

    Args:
        defaults: column name -> value of a sample never written.
        num_samples: ids are ``0 .. num_samples - 1``; None lets the tables grow with new ids.
        process_group: ranks that share the tables; None is the default group, or one process.
        device: where the tables lie; batches may lie elsewhere.
        dtype: of the columns; visits are int32.

    Bytes on this rank: ``(itemsize * columns + 4) * n / W``, and ``O(B)`` during a call.
    """

    def __init__(
        self,
        defaults: Mapping[str, float],
        *,
        num_samples: int | None,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_samples = num_samples
        self.defaults = dict(defaults)
        self._device, self._dtype = device, dtype
        self._split_over(process_group)

    def _split_over(self, process_group: dist.ProcessGroup | None) -> None:
        """Make empty tables for these ranks."""
        self._group, self._ranks = process_group, _ranks_of(process_group)
        self.world_size = len(self._ranks)
        self.rank = dist.get_rank(process_group) if self.world_size > 1 else 0
        slots = 0 if self.num_samples is None else self._slots_for(self.num_samples)
        self.columns = {
            name: torch.full((slots,), value, dtype=self._dtype, device=self._device)
            for name, value in self.defaults.items()
        }
        self.visits = torch.zeros(slots, dtype=torch.int32, device=self._device)
        self._is_empty = True

    def share(self, process_group: dist.ProcessGroup | None) -> None:
        """See that the tables are split over these ranks: they were made before the group was.

        Raises:
            ValueError: on all ranks, when they were split over others and hold values.
        """
        ranks = _ranks_of(process_group)
        if ranks == self._ranks:
            return
        if not self._is_empty:
            raise ValueError(
                f"the per-sample tables are split over ranks {_short(self._ranks)}, the loss is "
                f"called on ranks {_short(ranks)}: give the loss its process_group, or register "
                "the hook, before the first step"
            )
        self._split_over(process_group)

    def _slots_for(self, num_samples: int) -> int:
        return max(0, -(-(num_samples - self.rank) // self.world_size))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tables on this rank."""
        tables = (*self.columns.values(), self.visits)
        return sum(table.numel() * table.element_size() for table in tables)

    def describe(self) -> str:
        """Size of the tables in one line."""
        samples = "growing" if self.num_samples is None else f"{self.num_samples:,} samples"
        return (
            f"{samples}, {len(self.columns)} columns, {self.num_bytes / 2**20:.1f} MiB on each of "
            f"{self.world_size} rank(s)"
        )

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """Values of the samples ``index`` (int64 ``[B]``, the same on all ranks), on all ranks.

        ``visits`` is among them. One all-reduce of ``itemsize * (columns + 1) * B`` bytes.

        Raises:
            ValueError: on all ranks: an id is negative or beyond ``num_samples``.
        """
        self._check(index)
        names = [*self.columns, VISITS]
        dtype = next(iter(self.columns.values())).dtype
        values = torch.zeros(len(names), len(index), dtype=dtype, device=index.device)
        mine, slots = self._owned(index)
        for row, name in enumerate(names):
            table = self.visits if name == VISITS else self.columns[name]
            values[row, mine] = self._look_up(name, table, slots).to(values)
        if self.world_size > 1:
            # Owners send their value, everybody else 0: the sum is the value to the last bit,
            # provided it is finite; a NaN or an infinity of an owner arrives as NaN or infinity.
            dist.all_reduce(values, group=self._group)
        return dict(zip(names, values, strict=True))

    def write(self, index: Tensor, values: Mapping[str, Tensor]) -> None:
        """Store values of the global batch; each rank keeps those of its own samples.

        ``index`` int64 ``[B]`` and every value ``[B]`` are the same on all ranks; equal ids must
        have equal values. No communication.
        """
        mine, slots = self._owned(index)
        self._grow_to(slots)
        self._is_empty = False
        for name, value in values.items():
            table = self.visits if name == VISITS else self.columns[name]
            table[slots] = value[mine].to(table)

    def _look_up(self, name: str, table: Tensor, slots: Tensor) -> Tensor:
        """Values at ``slots``; the default of a sample that a growing table does not hold yet."""
        if self.num_samples is not None:
            return table[slots]
        values = table.new_full(slots.shape, self.defaults.get(name, 0))
        known = slots < len(table)
        values[known] = table[slots[known]]
        return values

    def _check(self, index: Tensor) -> None:
        if not len(index):
            return
        lowest, highest = int(index.min()), int(index.max())
        if lowest < 0:
            raise ValueError(f"sample id {lowest} is negative: ids are 0, 1, 2, ...")
        if self.num_samples is not None and highest >= self.num_samples:
            raise ValueError(
                f"sample id {highest} does not fit a table of {self.num_samples} samples: "
                "num_samples must be the size of the data set"
            )
        if self.num_samples is None and highest > HIGHEST_ID:
            raise ValueError(
                f"sample id {highest} is too large for a table that grows with its ids (a hash?): "
                "number the samples 0, 1, 2, ..."
            )

    def _owned(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Mask of this rank's samples in ``index``, and their slots (on the tables' device)."""
        mine = index % self.world_size == self.rank
        return mine, (index[mine] // self.world_size).to(self.visits.device)

    def _grow_to(self, slots: Tensor) -> None:
        """Make room for these slots."""
        needed = int(slots.max()) + 1 if len(slots) else 0
        if needed <= len(self.visits):
            return
        extra = max(-(-needed // GROWTH) * GROWTH, len(self.visits) * 5 // 4) - len(self.visits)
        for name, table in self.columns.items():
            self.columns[name] = torch.cat([table, table.new_full((extra,), self.defaults[name])])
        self.visits = torch.cat([self.visits, self.visits.new_zeros(extra)])

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the tables."""
        return {**self.columns, VISITS: self.visits}

    def load_parts(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over tables saved by any number of ranks: ``parts[r]`` is rank r's ``state_dict``.

        Raises:
            ValueError: other columns, or another number of samples than this table's.
        """
        for part in parts:
            if part.keys() != self.state_dict().keys():
                raise ValueError(
                    f"saved tables have columns {sorted(part)}, this run's {sorted(self.columns)}"
                )
        total = sum(len(part[VISITS]) for part in parts)
        if self.num_samples is not None and total != self.num_samples:
            raise ValueError(
                f"the saved tables hold {total} samples, this data set has {self.num_samples}"
            )
        self._split_over(self._group)  # a table that has grown may hold more than is loaded
        for rank, part in enumerate(parts):
            ids = torch.arange(len(part[VISITS])) * len(parts) + rank
            mine, slots = self._owned(ids)
            self._grow_to(slots)
            self._is_empty = False
            for name, value in part.items():
                table = self.visits if name == VISITS else self.columns[name]
                table[slots] = value[mine.to(value.device)].to(table)


def _ranks_of(process_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks of a group; of one process alone (0,)."""
    if not (dist.is_available() and dist.is_initialized()):
        return (0,)
    return tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))


def _short(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]} to {ranks[-1]} ({len(ranks)} of them)"
