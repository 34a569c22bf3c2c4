"""Puts a report together: one file with everything in it, nothing loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from disco_ds.report.charts import NUM_COLOURS, short
from disco_ds.report.panels import charts, headline_keys, title_of
from disco_ds.report.record import RunRecord, read_run
from disco_ds.report.tables import (
    data_table,
    evaluation_tables,
    overview,
    plan_table,
    settings_table,
    values_table,
    versions_table,
)


def write_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """Write the report of one or several runs to ``output``; returns it.

    Raises:
        ValueError: a folder is no run folder, or ``output`` cannot be written.
    """
    runs = [read_run(folder) for folder in run_dirs]
    text = _rendered(_distinct(runs))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f".{output.name}.partial")
        partial.write_text(text)
        partial.replace(output)
    except OSError as error:
        raise ValueError(f"{output}: cannot write the report ({error.strerror})") from error
    return output


UNREADABLE = (UndefinedError, TypeError, ValueError, KeyError, AttributeError, OverflowError)


def _rendered(runs: Sequence[RunRecord]) -> str:
    """The page, or which folder holds something that no run writes."""
    try:
        return render(runs)
    except UNREADABLE as error:
        for run in runs:
            try:
                render([run])
            except UNREADABLE as own:
                raise ValueError(
                    f"{run.folder}: its files are not what a run writes ({own})"
                ) from error
        raise


def _distinct(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs whose folders have the same name are called by their paths."""
    from dataclasses import replace

    names = [run.name for run in runs]
    return [replace(r, name=str(r.folder)) if names.count(r.name) > 1 else r for r in runs]


def render(runs: Sequence[RunRecord]) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader("disco_ds.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        runs=runs,
        num_colours=NUM_COLOURS,
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        tiles=_tiles(runs[0]) if len(runs) == 1 else [],
        overview=overview(runs),
        settings=settings_table(runs) if len(runs) > 1 else None,
        charts=charts(runs),
        evaluations=evaluation_tables(runs),
        looks=[(run, look) for run in runs for look in _looks(run)],
        data=data_table(runs),
        plans=[table for run in runs if (table := plan_table(run))],
        versions=versions_table(runs),
        configs=[(run.name, json.dumps(run.config, indent=2)) for run in runs if run.config],
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _looks(run: RunRecord) -> list[dict[str, Any]]:
    """Evaluations to look at closely: the run's newest, then those made afterwards."""
    own = [{"title": "at a closer look", "table": None, **run.details}] if run.details else []
    return own + [
        {"title": f"evaluated as {other['name']}", "table": values_table(other["values"]), **other}
        for other in run.others
    ]


def _asset(name: str) -> str:
    return resources.files("disco_ds.report").joinpath(name).read_text()


def _tiles(run: RunRecord) -> list[dict[str, Any]]:
    """The few numbers to see first."""
    total = f"of {run.total_steps:,}" if run.total_steps else ""
    tiles = [{"label": "Steps", "value": f"{run.steps:,}", "note": total}]
    if (loss := run.last("loss")) is not None:
        note = f"chance {run.chance:.3f}" if run.chance is not None else ""
        tiles.append({"label": "Loss", "value": f"{loss:.3f}", "note": note})
    if (rate := run.last("samples_per_second")) is not None:
        tiles.append({"label": "Samples/s", "value": short(round(rate, 1)), "note": "last lap"})
    values = run.evaluation()
    for key in headline_keys([run])[:4]:
        tiles.append({"label": title_of(key), "value": f"{100 * values[key]:.1f} %", "note": ""})
    return tiles
