"""Sweeps: one file or a few ``--set`` flags to the arguments of many runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from disco_ds.launch.resources import parse_yaml

Values = tuple[str, ...]
Overrides = dict[str, Values]
KEYS = ("grid", "zip", "list")


@dataclass(frozen=True)
class Sweep:
    """Settings of train.py without their dashes, and the values that they take."""

    grid: Mapping[str, tuple[Values, ...]] = field(default_factory=dict)
    """Every combination of values."""

    zip: Mapping[str, tuple[Values, ...]] = field(default_factory=dict)
    """Values that change together: the first of each, the second of each ..."""

    listed: tuple[Overrides, ...] = ()
    """Combinations written out."""

    def __post_init__(self) -> None:
        lengths = {key: len(values) for key, values in self.zip.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"zip: all need the same number of values, these have {lengths}")
        seen: set[str] = set()
        for keys in (self.grid, self.zip, {key for member in self.listed for key in member}):
            if twice := seen & set(keys):
                raise ValueError(f"{sorted(twice)[0]}: in more than one of {', '.join(KEYS)}")
            seen |= set(keys)
        for key, values in {**self.grid, **self.zip}.items():
            if not values:
                raise ValueError(f"{key}: no values")

    def with_grid(self, more: Mapping[str, tuple[Values, ...]]) -> Sweep:
        """The sweep with these settings instead of its own values for them."""
        return Sweep(
            grid={**{k: v for k, v in self.grid.items() if k not in more}, **more},
            zip={k: v for k, v in self.zip.items() if k not in more},
            listed=tuple({k: v for k, v in m.items() if k not in more} for m in self.listed),
        )

    def members(self) -> list[Overrides]:
        """All combinations: grid x zip x list, in the order in which they are written."""
        rows = [
            dict(zip(self.zip, values, strict=True))
            for values in zip(*self.zip.values(), strict=True)
        ]
        grids = [
            dict(zip(self.grid, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]
        parts = (grids, rows or [{}], self.listed or ({},))
        return [
            {key: value for part in combination for key, value in part.items()}
            for combination in itertools.product(*parts)
        ]


def load_sweep(path: Path) -> Sweep:
    """A sweep file: ``grid``, ``zip`` and ``list``, any of them.

    Raises:
        ValueError: naming the file and the key.
    """
    content = parse_yaml(path, "--sweep", yaml.BaseLoader)
    try:
        if not isinstance(content, dict) or not content:
            raise ValueError(f"needs at least one of {', '.join(KEYS)}")
        if unknown := sorted(set(content) - set(KEYS)):
            raise ValueError(f"key {unknown[0]}: unknown; known are {', '.join(KEYS)}")
        return Sweep(
            grid=_axes(content.get("grid", {}), "grid"),
            zip=_axes(content.get("zip", {}), "zip"),
            listed=tuple(_member(entry) for entry in _sequence(content.get("list", []), "list")),
        )
    except ValueError as error:
        raise ValueError(f"--sweep {path}: {error}") from error


def parse_set(text: str) -> tuple[str, tuple[Values, ...]]:
    """``optim.lr=1e-3,1e-4`` as a setting and its values.

    Raises:
        ValueError: not of this form.
    """
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values:
        raise ValueError(f"--set {text}: expected SETTING=VALUE[,VALUE ...]")
    return _key(key.strip()), tuple((value,) for value in values.split(","))


def _axes(content: object, where: str) -> dict[str, tuple[Values, ...]]:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a mapping of settings to lists of values")
    return {
        _key(key): tuple(_values(value) for value in _sequence(values, f"{where}.{key}"))
        for key, values in content.items()
    }


def _member(content: object) -> Overrides:
    if not isinstance(content, dict):
        raise ValueError("list must hold mappings of settings to values")
    return {_key(key): _values(value) for key, value in content.items()}


def _sequence(content: object, where: str) -> Sequence[object]:
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a list, is {content!r}")
    return content


def _key(key: str) -> str:
    """A setting's name as train.py knows it: a flag may be spelt with hyphens."""
    return key.removeprefix("--").replace("-", "_")


def _values(value: object) -> Values:
    """One value of a setting as words of a command line."""
    if isinstance(value, list):
        return tuple(word for part in value for word in _values(part))
    if not isinstance(value, str):
        raise ValueError(f"{value!r}: a value must be a scalar or a list")
    return ({"true": "True", "false": "False", "null": "None"}.get(value, value),)


def as_arguments(overrides: Overrides) -> list[str]:
    """Overrides as arguments of train.py. ``loss`` chooses the loss and comes first."""
    arguments = [f"loss:{overrides['loss'][0]}"] if "loss" in overrides else []
    for key, values in overrides.items():
        if key != "loss":
            arguments += [f"--{key}", *values]
    return arguments


def strip_arguments(arguments: Sequence[str], overrides: Overrides) -> list[str]:
    """The common arguments without those that a member sets itself."""
    kept: list[str] = []
    drop = False  # values that follow a flag belong to it
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_loss = argument.startswith("loss:")
        if flag.startswith("--"):
            drop = _key(flag) in overrides
        elif is_loss:
            drop = "loss" in overrides
        if not drop:
            kept.append(argument)
        if is_loss or (flag.startswith("--") and equals):
            drop = False
    return kept


def member_name(overrides: Overrides, signature: str) -> str:
    """A folder name that people can read and that two configurations never share."""
    words = [f"{key.rsplit('.', 1)[-1]}={'+'.join(value)}" for key, value in overrides.items()]
    text = re.sub(r"[^A-Za-z0-9=+.-]+", "_", "_".join(words))[:80].strip("._")
    return "-".join(filter(None, (text, signature[:8])))


NOT_IDENTITY = ("run_dir", "resume")


def signature(config: Mapping[str, Any]) -> str:
    """What makes two runs the same: the resolved configuration without where it is kept."""
    identity = {key: value for key, value in config.items() if key not in NOT_IDENTITY}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def chunks(count: int, size: int) -> Iterator[range]:
    """``range(count)`` in pieces of at most ``size``, as even as they can be."""
    pieces = -(-count // size)
    for piece in range(pieces):
        yield range(piece * count // pieces, (piece + 1) * count // pieces)


def share_parallel(max_parallel: int | None, parts: Sequence[int]) -> list[int | None]:
    """How many members of each chunk may run at a time, so that all stay within the limit.

    With a limit below the number of chunks they have to follow each other, each with the whole
    limit.
    """
    if max_parallel is None or max_parallel < len(parts):
        return [max_parallel] * len(parts)
    total = sum(parts)
    shares = [max(1, max_parallel * part // total) for part in parts]
    while sum(shares) > max_parallel:
        shares[shares.index(max(shares))] -= 1
    for position in range(max_parallel - sum(shares)):
        shares[position % len(shares)] += 1
    return list(shares)
