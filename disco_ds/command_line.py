"""The arguments of train.py: preset or file, then flags; one line for every mistake."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tyro

from disco_ds import open_clip_flags
from disco_ds.config import (
    LossConfig,
    TrainConfig,
    fixed_name,
    leaves,
    options_of,
    read_config,
    suggest,
)

TYRO_TITLES = r"^(.*?Error parsing (TrainConfig: |\w+: (?=--))?|Invalid choice |Missing argument )"

LOSSES = [f"loss:{fixed_name(option)}" for option in options_of(LossConfig)]
KNOWN = [f"--{name}" for name, _ in leaves(TrainConfig)]
SWITCHES = {f"--{name}" for name, hint in leaves(TrainConfig) if hint is bool}
SPELLINGS = {
    **dict.fromkeys(("true", "1", "yes"), "True"),
    **dict.fromkeys(("false", "0", "no"), "False"),
}


def parse_command_line(
    arguments: Sequence[str], presets: Mapping[str, Callable[[], TrainConfig]]
) -> tuple[TrainConfig, str | None]:
    """The configuration that the arguments of train.py mean, and the preset's name.

    ``--local_rank`` and ``--deepspeed``, which launchers append, are ignored.

    Raises:
        ValueError: one line naming the flag, key or file, its value and the remedy.
        SystemExit: after ``--help``.
    """
    rest, special = _take_out(
        arguments, ("--preset", "--config", "--local_rank", "--local-rank"), ("--deepspeed",)
    )
    if "--preset" in special and "--config" in special:
        raise ValueError("--preset and --config exclude each other")
    default: TrainConfig | None = None
    if (name := special.get("--preset")) is not None:
        if name not in presets:
            raise ValueError(f"--preset {name}: {suggest(name, presets)}")
        default = presets[name]()
    if (path := special.get("--config")) is not None:
        default = read_config(Path(path))
    if reason := open_clip_flags.hint(rest) or _loss_by_flag(rest):
        raise ValueError(reason)
    config = _run_tyro(_spell_out_booleans(rest), _without_rival(default, rest))
    return config, special.get("--preset")


def _loss_by_flag(arguments: Sequence[str]) -> str | None:
    flags = (argument.partition("=")[0] for argument in arguments)
    if (flag := next((f for f in flags if f in ("--loss", "--loss.name")), None)) is None:
        return None
    return f"{flag}: a loss is chosen by one of {', '.join(LOSSES)}, without a flag"


def _without_rival(default: TrainConfig | None, arguments: Sequence[str]) -> TrainConfig | None:
    """``--steps`` takes the place of a preset's ``--epochs``, and the other way round."""
    flags = {argument.partition("=")[0] for argument in arguments}
    if default is None or {"--steps", "--epochs"} <= flags:
        return default
    if "--steps" in flags and default.epochs is not None:
        return replace(default, epochs=None, steps=1)
    if "--epochs" in flags and default.steps is not None:
        return replace(default, steps=None, epochs=1)
    return default


def _spell_out_booleans(arguments: Sequence[str]) -> list[str]:
    """``--x``, ``--x true`` and ``--x 1`` for ``--x True``, and so on, where x is a switch."""
    found, is_open = [], False  # is_open: the argument before is a switch that has no value yet
    for argument in [*arguments, "--"]:
        flag, equals, value = argument.partition("=")
        if is_open and argument.startswith(("--", "loss:")):
            found.append("True")
        elif is_open:
            argument = SPELLINGS.get(argument.lower(), argument)
        is_switch = flag.replace("-", "_").replace("__", "--", 1) in SWITCHES
        if is_switch and equals:
            argument = f"{flag}={SPELLINGS.get(value.lower(), value)}"
        is_open = is_switch and not equals
        found.append(argument)
    return found[:-1]


def _take_out(
    arguments: Sequence[str], with_value: Sequence[str], alone: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Split off flags that are not part of the tree, in both spellings (--x V and --x=V)."""
    rest, found = [], {}
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        flag, equals, value = argument.partition("=")
        if argument in alone:
            continue
        if flag not in with_value:
            rest.append(argument)
        elif equals:
            found[flag] = value
        elif queue:
            found[flag] = queue.pop(0)
        else:
            raise ValueError(f"{flag} needs a value")
    return rest, found


def _run_tyro(arguments: list[str], default: TrainConfig | None) -> TrainConfig:
    """Parse with tyro; its boxed message becomes one line."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            config, unknown = tyro.cli(
                TrainConfig,
                prog="train.py",
                args=arguments,
                default=default,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.FlagConversionOff),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(re.sub(TYRO_TITLES, "", unboxed(output.getvalue()))) from None
    assert config is not None
    if unknown:
        raise ValueError(_unknown_argument(unknown[0]))
    return config


def unboxed(boxed: str) -> str:
    """In one line what tyro drew in a box: a title and the reason."""
    words = "".join(" " if 0x2500 <= ord(char) < 0x25A0 else char for char in boxed)
    return " ".join(words.split()).split(" For full helptext")[0].split(" Argument helptext")[0]


def _unknown_argument(argument: str) -> str:
    flag = argument.partition("=")[0]
    if not flag.startswith("--"):
        return f"{argument}: {suggest(argument, LOSSES)}"
    owners = [
        f"loss:{fixed_name(option)}"
        for option in options_of(LossConfig)
        if flag.removeprefix("--loss.") in {f.name for f in dataclasses.fields(option)}
    ]
    if flag.startswith("--loss.") and owners:
        return f"{flag}: name the loss before its flags: {' or '.join(owners)}, then {flag}"
    return f"{flag}: {suggest(flag, KNOWN, list_all=False)}"
