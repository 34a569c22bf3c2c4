"""Command line of the launcher: flags, profile, one line for every mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from disco_ds.command_line import unboxed
from disco_ds.config import TrainConfig
from disco_ds.launch.commands import COMMANDS, Command, with_resources
from disco_ds.launch.resources import Resources, load_profile

WRONG_INPUT = 2
SUBMITTING = ("train", "array")
# First parts of flags of train.py, by which a forgotten -- is recognised.
TRAIN_FLAGS = {"preset", "config", *(f.name for f in dataclasses.fields(TrainConfig))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    logging.basicConfig(format="%(message)s")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        own, rest = _split(words)
        return int(_parse(own).run(rest))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return WRONG_INPUT
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own arguments, and those of train.py after ``--``."""
    if "--" not in words:
        return words, []
    cut = words.index("--")
    if words[0] not in SUBMITTING:
        raise ValueError(f"{words[0]} takes no arguments of train.py after --")
    return words[:cut], words[cut + 1 :]


def _parse(words: list[str]) -> Any:
    output = io.StringIO()
    kwargs: dict[str, Any] = {"args": words}
    cls: Any = Command
    if words and words[0] in SUBMITTING:
        cls = COMMANDS[words[0]]
        words, more = _take_pairs(words)
        default = with_resources(words[0], _defaults(words, more))
        kwargs = {"args": words[1:], "default": default}
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(
                cls,
                prog=f"slurm.py {words[0]}" if cls is not Command else "slurm.py",
                use_underscores=True,
                **kwargs,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(output.getvalue())) from None


def _take_pairs(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Split off ``--env`` and ``--sbatch``, which may be repeated: NAME VALUE ... or NAME=VALUE."""
    rest: list[str] = []
    found: dict[str, dict[str, str]] = {"env": {}, "sbatch": {}}
    queue = list(words)
    while queue:
        flag, dot, name = queue.pop(0).partition(".")
        if flag.removeprefix("--") not in found or not flag.startswith("--"):
            rest.append(f"{flag}{dot}{name}")
            continue
        pairs = found[flag.removeprefix("--")]
        if dot:  # --env.NAME VALUE
            queue.insert(0, name)
        elif not queue or queue[0].startswith("--"):
            raise ValueError(f"{flag} needs NAME VALUE")
        while queue and not queue[0].startswith("--"):
            name, equals, value = queue.pop(0).partition("=")
            if not equals and not queue:
                raise ValueError(f"{flag} {name} needs a value: {flag} {name} VALUE")
            pairs[name] = value if equals else queue.pop(0)
    return rest, found


def _defaults(words: Sequence[str], more: Mapping[str, Mapping[str, str]]) -> Resources:
    """The profile, with --cluster already in it: what is allowed depends on it."""
    profile = _value(words, "--profile")
    resources = load_profile(Path(profile)) if profile is not None else Resources()
    merged = {field: {**getattr(resources, field), **pairs} for field, pairs in more.items()}
    resources = dataclasses.replace(resources, **merged)  # type: ignore[arg-type]
    cluster = _value(words, "--cluster")
    if cluster in ("slurm", "local", "debug"):
        return dataclasses.replace(resources, cluster=cluster)  # type: ignore[arg-type]
    return resources


def _value(words: Sequence[str], flag: str) -> str | None:
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _one_line(boxed: str) -> str:
    text = re.sub(r"^(Parsing error |Unrecognized options )", "", unboxed(boxed))
    if any(f" --{name}" in f" {text}" for name in TRAIN_FLAGS):
        text += " (arguments of train.py come after --)"
    return text
