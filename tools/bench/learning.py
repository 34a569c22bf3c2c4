"""The paper's table in miniature: FastCLIP, its parents and InfoNCE on emoji of many artists.

    python tools/bench/learning.py [--forms heads] [--jobs 1] [--quick] [--report]

Trained are five artists' pictures of about 1,700 emoji; the measure is R@1 of the right name for
pictures of two artists never seen. Temperatures, gammas, rho and the rates of optimizers
are chosen on a third artist, at batch 64 and on seeds of their own, then kept for all batches.
Every column sees the same number of samples.

* ``heads``: two projection heads on frozen towers; seconds a run.
* ``scratch``: the demo's ResNet and text tower at 64 px; minutes a run. Gammas and rho are those
  of the heads; temperatures and the rates of optimizers are searched for again. Four rows
  that are variants of others are left out.

Needs the extra ``test``, npm and pip (once). Runs are kept one by one in
``results/learning_runs.jsonl``: start again to go on, delete it to start anew. ``--report`` writes
what is there; ``--quick`` does a small part and keeps nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import learning_parity
import learning_plot
import torch
from learning_choose import Chooser, choose_again, choose_losses, choose_optimizers
from learning_fetch import CannotFetch
from learning_models import TESTS, VALIDATION, emoji, features
from learning_report import aggregate, differences, in_short, markdown, write_csv
from learning_rows import Form, Row, Run, fastclip, info_nce, loss_rows, optimizer_rows
from learning_store import Result, Store, run_all

RESULTS = Path(__file__).parent / "results"
STORE = RESULTS / "learning_runs.jsonl"
FORMS: tuple[Form, ...] = ("heads", "scratch")
EPOCHS: dict[Form, int] = {"heads": 40, "scratch": 20}
SEEDS: dict[Form, int] = {"heads": 5, "scratch": 3}
ARTISTS = (*TESTS, VALIDATION)
BATCH_ORDER = (64, 256, 16, 32)  # the most telling first


def places(form: Form) -> list[tuple[int, int]]:
    """Batches and seeds in the order in which they are run: three seeds of each batch first."""
    first, more = range(3), range(3, SEEDS[form])
    return [(batch, seed) for seeds in (first, more) for batch in BATCH_ORDER for seed in seeds]


class Unfinished(Exception):
    """A report needs a run that was not done yet."""


class Session:
    """Runs of this call; ``jobs`` 0 does none."""

    def __init__(self, store: Store, jobs: int) -> None:
        self.store, self.jobs = store, jobs
        self.reported: list[Result] = []
        self.choices: list[str] = []

    def execute(self, runs: Sequence[Run]) -> list[Result]:
        """Results in order, after doing what is missing."""
        if self.jobs:
            run_all(runs, self.store, jobs=self.jobs)
        elif self.store.missing(runs):
            raise Unfinished
        return self.store.done(runs)

    def chooser(self, form: Form) -> Chooser:
        """Searches of a form."""
        return Chooser(form, EPOCHS[form], VALIDATION, self.execute, self.choices)

    def rows(self, form: Form) -> list[Row]:
        """Choose, run and report all rows of a form, as far as there are results."""
        rows: list[Row] = []
        try:
            found = choose_losses(self.chooser("heads"))
            if form == "scratch":
                found = choose_again(self.chooser(form), found)
            rows += loss_rows(form, found)
            rows += optimizer_rows(choose_optimizers(self.chooser(form), found["v3"]), found["v3"])
        except Unfinished:
            print(f"{form}: not all choices are made")
        self._run(form, rows)
        return rows

    def _run(self, form: Form, rows: list[Row]) -> None:
        runs = [
            Run(form, row, batch, seed, EPOCHS[form])
            for batch, seed in places(form)
            for row in rows
        ]
        if self.jobs:
            run_all(runs, self.store, jobs=self.jobs)
        self.reported += self.store.done(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--quick", action="store_true", help="minutes; keeps no results")
    parser.add_argument("--report", action="store_true", help="run nothing, write what is there")
    options = parser.parse_args()
    learning_parity.check()
    try:
        emoji()
        if options.quick or ("heads" in options.forms and not options.report):
            features()  # made here once, not by every process
    except CannotFetch as error:
        raise SystemExit(str(error)) from error
    if options.quick:
        quick(options.jobs)
        return
    session = Session(Store(STORE), 0 if options.report else options.jobs)
    rows = {form: session.rows(form) for form in options.forms}
    report(session, rows)


def quick(jobs: int) -> None:
    """Heads, three rows, batch 64, two seeds, half of the epochs."""
    epochs = EPOCHS["heads"] // 2
    rows = [Row("open_clip, default", None), info_nce(0.1), fastclip("FastCLIP-v3", "v3", epochs)]
    store = Store(None)
    run_all(
        [Run("heads", row, 64, seed, epochs) for seed in range(2) for row in rows], store, jobs=jobs
    )
    cells = aggregate(store.results.values(), TESTS)
    print(markdown(cells, "heads", rows))
    print(in_short(cells, "heads"))


def report(session: Session, rows: dict[Form, list[Row]]) -> None:
    """Print and write the tables; write CSV and plot."""
    cells = aggregate(session.reported, TESTS)
    if not cells:
        return
    data = emoji()
    note = (
        f"{datetime.date.today()}, R@1 in percent of the right name, {len(data.artists)} pictures "
        f"of {len(data.names)} emoji, validation {VALIDATION}, epochs {EPOCHS}, fp32, one thread, "
        f"torch {torch.__version__}, {os.cpu_count()} cores {platform.machine()}"
    )
    parts = [f"<!-- Written by tools/bench/learning.py: {note} -->"]
    for form, own in rows.items():
        parts += [
            f"## {form}: R@1 on {' and '.join(TESTS)}, never seen (mean ± sd over seeds)",
            markdown(cells, form, own),
            f"Each artist alone, and {VALIDATION}, on which settings were chosen:",
            *[f"{artist}\n\n{markdown(cells, form, own, artist)}" for artist in ARTISTS],
            "Differences between rows, paired by seed, in points:",
            differences(session.reported, form, TESTS),
        ]
    parts += ["## Choices (R@1 on the validation artist, B = 64)"]
    parts += ["\n".join(f"- {line}" for line in dict.fromkeys(session.choices))]
    text = "\n\n".join(parts) + "\n"
    print(text)
    (RESULTS / "learning.md").write_text(text)
    write_csv(cells, RESULTS / "learning.csv", note)
    learning_plot.draw(cells, RESULTS / "learning.png")
    print(in_short(cells, next(iter(rows))))


if __name__ == "__main__":
    main()
