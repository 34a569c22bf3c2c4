"""Results of runs, one JSON line each: a run that was done is not done again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from learning_rows import Run

Result = dict[str, Any]


class Store:
    """The file of results (None: kept in memory), by the key of the run."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.results: dict[str, Result] = {}
        if path is not None and path.is_file():
            for line in path.read_text().splitlines():
                if line.endswith("}"):  # the last line of a killed session may be cut
                    result = json.loads(line)
                    self.results[result["key"]] = result

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """Those not done yet, each once, in order."""
        unique = {run.key: run for run in runs}
        return [run for key, run in unique.items() if key not in self.results]

    def done(self, runs: Iterable[Run]) -> list[Result]:
        """The results of those runs that were done, in order."""
        return [self.results[run.key] for run in runs if run.key in self.results]

    def add(self, run: Run, outcome: dict[str, Any]) -> None:
        """Keep a result, flushed."""
        result = {
            "key": run.key,
            "form": run.form,
            "name": run.row.name,
            "batch": run.batch,
            "seed": run.seed,
            "epochs": run.epochs,
            **outcome,
        }
        self.results[run.key] = result
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write(("\n" if cut else "") + json.dumps(result) + "\n")


def run_all(runs: Iterable[Run], store: Store, *, jobs: int) -> None:
    """Do what is missing, in order, ``jobs`` processes of one thread each; print each result."""
    todo = store.missing(runs)
    if not todo:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # before the processes start
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_do, run): run for run in todo}
        for done, future in enumerate(as_completed(waiting), start=1):
            run, outcome = waiting[future], future.result()
            store.add(run, outcome)
            shown = "  ".join(f"{artist} {value:.1f}" for artist, value in outcome["seen"].items())
            print(
                f"{done}/{len(todo)} {run.form} {run.row.name}, B {run.batch}, seed {run.seed}: "
                f"{shown}  tau {outcome['tau']:.3f}  {outcome['seconds']:.0f} CPU s",
                flush=True,
            )


def _do(run: Run) -> dict[str, Any]:
    import torch
    from learning_train import train

    torch.set_num_threads(1)
    return asdict(train(run))
