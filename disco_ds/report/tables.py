"""The tables of a report: a row per fact, a column per run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from disco_ds.report.charts import short
from disco_ds.report.panels import chance_of, metric_title, set_title
from disco_ds.report.record import RunRecord

Kind = Literal["", "better", "worse"]


@dataclass(frozen=True)
class Cell:
    """One value, and how it differs from the first run's."""

    text: str
    delta: str = ""
    kind: Kind = ""


@dataclass(frozen=True)
class Row:
    """A labelled row."""

    label: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Table:
    """A titled table; the first column holds the labels."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


def overview(runs: Sequence[RunRecord]) -> Table:
    """What was run and what came out of it."""
    facts: Sequence[tuple[str, Callable[[RunRecord], str]]] = (
        ("Status", _status),
        ("Steps", _steps),
        ("Model", lambda run: _text(run.setting("model.name"))),
        ("Loss", _loss_name),
        ("Strategy", _strategy),
        ("Ranks", lambda run: _text(run.info.get("world_size"))),
        ("Global batch", lambda run: _text(run.setting("global_batch_size"))),
        ("Precision", lambda run: _text(run.setting("precision"))),
        ("Optimizer", _optimizer),
        ("Training data", lambda run: _text(" ".join(run.setting("data.shards", ())))),
        ("Samples seen", lambda run: _count(run.last("samples_seen"))),
        ("Last loss (chance)", _last_loss),
        ("Samples/s, median", _throughput),
        ("Skipped steps", lambda run: _count(run.last("skipped_steps"))),
        ("Device", lambda run: _text(run.info.get("device"))),
        ("Command", lambda run: _text(run.info.get("command"))),
        ("Started", lambda run: _text(run.info.get("started"))),
        ("Ended", lambda run: _text(run.outcome.get("ended"))),
    )
    rows = [Row(label, [Cell(fact(run)) for run in runs]) for label, fact in facts]
    return _table("", runs, rows)


def values_table(values: dict[str, float]) -> Table:
    """Results of one evaluation, chance beside what was reached."""
    rows = []
    for key, value in values.items():
        _, name, metric = key.split("/", 2)
        chance = chance_of(key, values)
        cells = [
            Cell(format_metric(metric, value)),
            Cell("" if chance is None else format_metric(metric, chance)),
        ]
        rows.append(Row(f"{set_title(name)}: {metric_title(metric)}", cells))
    return Table("", ["", "chance"], rows)


def _table(title: str, runs: Sequence[RunRecord], rows: Iterable[Row], *more: str) -> Table:
    """Without the rows in which no run has anything to say."""
    kept = [row for row in rows if any(cell.text for cell in row.cells)]
    return Table(title, [*more, *(run.name for run in runs)], kept)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _status(run: RunRecord) -> str:
    return f"{run.status}: {run.reason}" if run.reason else run.status


def _steps(run: RunRecord) -> str:
    return f"{run.steps:,} of {run.total_steps:,}" if run.total_steps else f"{run.steps:,}"


def _loss_name(run: RunRecord) -> str:
    name, version = run.setting("loss.name"), run.setting("loss.version")
    return f"{name} {version}" if version else _text(name)


def _strategy(run: RunRecord) -> str:
    name = run.info.get("strategy") or run.setting("strategy")
    file = run.setting("deepspeed_config")
    return f"{name} ({file})" if file else _text(name)


def _optimizer(run: RunRecord) -> str:
    name, lr = run.setting("optim.name"), run.setting("optim.lr")
    return f"{name}, peak learning rate {lr:g}" if name and lr else ""


def _last_loss(run: RunRecord) -> str:
    loss = run.last("loss")
    chance = f" ({run.chance:.3f})" if run.chance is not None else ""
    return "" if loss is None else f"{loss:.4f}{chance}"


def _throughput(run: RunRecord) -> str:
    rates = [value for _, value in run.series("samples_per_second") if value is not None]
    return short(statistics.median(rates)) if rates else ""


def evaluation_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """A table per evaluation set: every metric with chance, and differences from the first run."""
    values = [run.evaluation() for run in runs]
    names = dict.fromkeys(key.split("/")[1] for found in values for key in found)
    return [_evaluation_table(name, runs, values) for name in names]


def _evaluation_table(
    name: str, runs: Sequence[RunRecord], values: Sequence[dict[str, float]]
) -> Table:
    head = f"eval/{name}/"
    keys = dict.fromkeys(key for found in values for key in found if key.startswith(head))
    rows = []
    for key in keys:
        metric = key.removeprefix(head)
        if metric == "chance":
            continue
        first = next((found for found in values if key in found), {})
        chance = chance_of(key, first)
        cells = [Cell("" if chance is None else format_metric(metric, chance))]
        cells += [_compared(metric, found.get(key), values[0].get(key)) for found in values]
        rows.append(Row(metric_title(metric), cells))
    return _table(set_title(name), runs, rows, "chance")


def _compared(metric: str, value: float | None, reference: float | None) -> Cell:
    if value is None:
        return Cell("")
    text = format_metric(metric, value)
    if reference is None or value == reference or metric.startswith("num_"):
        return Cell(text)
    difference = value - reference
    better = (difference < 0) if "rank" in metric else (difference > 0)
    shown = f"{difference:+g}" if "rank" in metric else f"{100 * difference:+.1f}"
    return Cell(text, shown, "better" if better else "worse")


def format_metric(metric: str, value: float) -> str:
    """Counts and ranks as they are, everything else in percent."""
    if metric.startswith("num_") or "rank" in metric:
        return f"{value:,.10g}"
    return f"{100 * value:.1f}\u00a0%"


def data_table(runs: Sequence[RunRecord]) -> Table:
    """Samples seen, repeated, unseen, and skipped by reason."""
    accounts = [run.data_account() for run in runs]
    keys = dict.fromkeys(key for account in accounts for key in account)
    order = sorted(keys, key=lambda key: ("/skipped" in key, key != "data/seen"))
    rows = [
        Row(_data_label(key), [Cell(_count(account.get(key))) for account in accounts])
        for key in order
    ]
    return _table("", runs, rows)


def _data_label(key: str) -> str:
    name = key.removeprefix("data/")
    if name.startswith("skipped_"):
        return "Skipped: " + name.removeprefix("skipped_").replace("_", " ")
    return name.replace("_", " ").capitalize()


def settings_table(runs: Sequence[RunRecord]) -> Table:
    """Settings in which the runs differ."""
    flat = [flatten(run.config) for run in runs]
    keys = sorted(set().union(*flat))
    rows = [
        Row(key, [Cell(_plain_value(settings.get(key))) for settings in flat])
        for key in keys
        if len({_plain_value(settings.get(key)) for settings in flat}) > 1
    ]
    return _table("", runs, rows)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of a configuration."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _plain_value(value: Any) -> str:
    return "\u2013" if value is None else json.dumps(value) if not isinstance(value, str) else value


def plan_table(run: RunRecord) -> Table | None:
    """The planner's prediction beside what was measured; None without one."""
    predicted, measured = (run.plan.get(part) or {} for part in ("predicted", "measured"))
    rows = []
    for key in dict.fromkeys([*predicted, *measured]):
        before, after = predicted.get(key), measured.get(key)
        label = key.replace("_", " ").capitalize()
        amounts = [Cell(_amount(key, value)) for value in (before, after)]
        rows.append(Row(label, [*amounts, Cell(_difference(before, after))]))
    return Table(run.name, ["predicted", "measured", "difference"], rows) if rows else None


def _difference(before: Any, after: Any) -> str:
    if not (_is_number(before) and _is_number(after) and before):
        return ""
    return f"{100 * (after - before) / before:+.1f} %"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _amount(key: str, value: Any) -> str:
    if not _is_number(value):
        return _text(value)
    if "bytes" in key or "memory" in key:
        return f"{value / 2**30:.3f} GiB" if value >= 2**27 else f"{value / 2**20:.3f} MiB"
    return short(float(value))


def versions_table(runs: Sequence[RunRecord]) -> Table:
    """Versions of what the numbers depend on."""
    found = [run.info.get("versions") or {} for run in runs]
    names = dict.fromkeys(name for versions in found for name in versions)
    rows = [Row(name, [Cell(_text(versions.get(name))) for versions in found]) for name in names]
    return _table("", runs, rows)
