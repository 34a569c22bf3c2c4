"""Choose temperatures, gammas, rho and rates on the validation artist, at one batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from learning_rows import (
    Form,
    Row,
    Run,
    carried_over,
    first_searches,
    optimizer_searches,
    second_searches,
    tau_searches,
)
from learning_store import Result

BATCH = 64
SEEDS: dict[Form, tuple[int, ...]] = {"heads": (100, 101), "scratch": (100,)}  # none reported
SCRATCH_TAUS = (0.07, 0.1, 0.14, 0.2)

Execute = Callable[[Sequence[Run]], list[Result]]


@dataclass(frozen=True)
class Chooser:
    """Searches of one form; ``execute`` does runs and gives their results in order."""

    form: Form
    epochs: int
    artist: str
    execute: Execute
    log: list[str] = field(default_factory=list)
    """A line for every search."""

    def best(self, groups: Mapping[str, Sequence[Row]]) -> dict[str, Row]:
        """Of every group the row with the highest mean over seeds on the validation artist."""
        self.execute([run for rows in groups.values() for run in self._runs(rows)])
        found = {}
        for what, rows in groups.items():
            values = self.values(rows)
            found[what] = max(rows, key=lambda row: values[row.name])
            shown = "; ".join(f"{name}: {value:.1f}" for name, value in values.items())
            self.log.append(f"{self.form}, chosen {found[what].name} ({shown})")
            print(self.log[-1], flush=True)
        return found

    def values(self, rows: Sequence[Row]) -> dict[str, float]:
        """Mean recall on the validation artist by candidate, percent."""
        results = self.execute(self._runs(rows))
        found: dict[str, list[float]] = {row.name: [] for row in rows}
        for result in results:
            found[result["name"]].append(result["seen"][self.artist])
        return {name: mean(values) for name, values in found.items()}

    def _runs(self, rows: Sequence[Row]) -> list[Run]:
        seeds = SEEDS[self.form]
        return [Run(self.form, row, BATCH, seed, self.epochs) for row in rows for seed in seeds]


def choose_losses(chooser: Chooser) -> dict[str, Row]:
    """Everything but the optimizers' rates."""
    found = chooser.best(first_searches(chooser.epochs))
    return found | chooser.best(second_searches(chooser.epochs, found))


def choose_again(chooser: Chooser, found: Mapping[str, Row]) -> dict[str, Row]:
    """From scratch: constant temperatures anew, the rest as chosen for the heads."""
    taus = chooser.best(tau_searches(chooser.epochs, SCRATCH_TAUS))
    return carried_over(found, taus, chooser.epochs)


def choose_optimizers(chooser: Chooser, v3: Row) -> dict[str, Row]:
    """A rate for each optimizer."""
    return chooser.best(optimizer_searches(v3))
