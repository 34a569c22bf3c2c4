"""A run folder as the report reads it: plain JSON, and any part of it may be missing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_ds.metrics import METRICS_FILE

CONFIG_FILE = "config.json"
INFO_FILE = "run.json"
OUTCOME_FILE = "outcome.json"
PLAN_FILE = "plan.json"
EVALUATIONS = "evaluations"

Point = tuple[float, float | None]


@dataclass(frozen=True)
class RunRecord:
    """What one run left behind."""

    name: str
    folder: Path
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    """``metrics.jsonl``."""
    info: dict[str, Any]
    outcome: dict[str, Any]
    plan: dict[str, Any]
    """``{"predicted": {...}, "measured": {...}}`` of the planner."""
    details: dict[str, Any]
    """The newest evaluation's confusions and pictures."""
    others: tuple[dict[str, Any], ...] = ()
    """What ``disco-ds evaluate -o RUN/evaluations/NAME.json`` found: ``name``, and as above."""

    def series(self, key: str) -> list[Point]:
        """(step, value) of every line that has the key; None where it was not finite."""
        return [(float(line["step"]), line[key]) for line in self.lines if key in line]

    def last(self, key: str) -> float | None:
        """The newest finite value."""
        values = [value for _, value in self.series(key) if value is not None]
        return values[-1] if values else None

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted name."""
        node: Any = self.config
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    @property
    def steps(self) -> int:
        """The last step that was logged."""
        return max((int(line["step"]) for line in self.lines), default=0)

    @property
    def total_steps(self) -> int | None:
        """Steps the run was meant to take, where known."""
        steps = self.setting("steps") or self.info.get("total_steps")
        return int(steps) if steps else None

    @property
    def chance(self) -> float | None:
        """The loss of a model that has learnt nothing."""
        logged = self.last("chance_level")
        size = self.setting("global_batch_size")
        return logged if logged is not None else (math.log(size) if size else None)

    @property
    def status(self) -> str:
        """done, failed, stopped, or unfinished (running, or killed without a word)."""
        if self.outcome:
            return str(self.outcome.get("status", "unfinished"))
        return "done" if self.total_steps and self.steps >= self.total_steps else "unfinished"

    @property
    def reason(self) -> str:
        """Why it ended; empty when it was done or nothing is known."""
        return str(self.outcome.get("reason", ""))

    def evaluation(self) -> dict[str, float]:
        """The newest value of every ``eval/...`` key."""
        newest: dict[str, float] = {}
        for line in self.lines:
            found = {k: v for k, v in line.items() if k.startswith("eval/") and v is not None}
            newest |= found
        return newest

    def data_account(self) -> dict[str, float]:
        """Samples by ``data/...`` key, summed over the accounts of all epochs."""
        total: dict[str, float] = {}
        for line in self.lines:
            for key, value in line.items():
                if key.startswith("data/") and value is not None:
                    total[key] = total.get(key, 0.0) + value
        return total


def read_run(folder: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        ValueError: it is none.
    """
    config = _read(folder / CONFIG_FILE)
    info, outcome = _read(folder / INFO_FILE), _read(folder / OUTCOME_FILE)
    metrics = folder / METRICS_FILE
    if not (config or info or outcome or metrics.is_file()):
        reason = "is not a run folder" if folder.is_dir() else "no such folder"
        raise ValueError(f"{folder}: {reason} (there is no {CONFIG_FILE} and no {METRICS_FILE})")
    return RunRecord(
        name=folder.resolve().name,
        folder=folder,
        config=config,
        lines=_read_lines(folder) if metrics.is_file() else [],
        info=info,
        outcome=outcome,
        plan=_read(folder / PLAN_FILE),
        details=_newest_details(folder / EVALUATIONS),
        others=_other_evaluations(folder / EVALUATIONS),
    )


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty when missing or unreadable: a report shows what there is."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_lines(folder: Path) -> list[dict[str, Any]]:
    """Damaged lines are left out, and of a line what is no number."""
    lines = (folder / METRICS_FILE).read_text(errors="replace").splitlines()
    entries = (_numbers(_parsed(line)) for line in lines)
    return [entry for entry in entries if entry.get("step") is not None]


def _numbers(line: dict[str, Any]) -> dict[str, float | None]:
    """Finite numbers; None for those that are not finite (JSON has none) or that were None."""
    return {
        key: value if value is not None and math.isfinite(value) else None
        for key, value in line.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def _parsed(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _newest_details(folder: Path) -> dict[str, Any]:
    """Of the evaluations of the run itself."""
    found = [_details(path) for path in sorted(folder.glob("step_*.json"))]
    return max(found, key=lambda content: content["step"] or 0, default={})


def _other_evaluations(folder: Path) -> tuple[dict[str, Any], ...]:
    paths = [path for path in sorted(folder.glob("*.json")) if not path.name.startswith("step_")]
    found = [{"name": path.stem, **_details(path)} for path in paths]
    return tuple(entry for entry in found if entry["values"])


def _details(path: Path) -> dict[str, Any]:
    """An evaluation's file; parts that are not what they should be are left out."""
    content = _read(path)
    values, zero_shot, retrieval = (
        part if isinstance(part := content.get(key), dict) else {}
        for key in ("values", "zero_shot", "retrieval")
    )
    step = content.get("step")
    return {
        "step": step if isinstance(step, int) else None,
        "source": str(content.get("source", "")),
        "values": {
            key: value
            for key, value in _numbers(values).items()
            if value is not None and key.count("/") >= 2
        },
        "zero_shot": {
            name: task
            for name, task in zero_shot.items()
            if isinstance(task, dict) and isinstance(task.get("confusions"), list)
        },
        "retrieval": {name: found for name, found in retrieval.items() if isinstance(found, dict)},
    }
