"""The configuration of a run: one frozen tree, from defaults, preset or file, and command line.

Each component owns its part. Precedence: defaults < ``--preset`` or ``--config`` < flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from disco_ds.checkpoint import CheckpointConfig
from disco_ds.comm_hooks import CommHookConfig
from disco_ds.data.config import DataConfig
from disco_ds.evaluation.run import EvaluationConfig
from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.siglip import SigLIPConfig
from disco_ds.metrics import TrackingConfig
from disco_ds.models import ModelConfig, TemperatureConfig
from disco_ds.optim import OptimConfig
from disco_ds.strategies.config import EngineConfig, Precision, StrategyName

LossConfig = (
    Annotated[DiscoConfig, tyro.conf.subcommand("disco", prefix_name=True)]
    | Annotated[SigLIPConfig, tyro.conf.subcommand("siglip", prefix_name=True)]
    | Annotated[FastCLIPConfig, tyro.conf.subcommand("fastclip", prefix_name=True)]
)


@dataclass(frozen=True)
class TrainConfig:
    """Train a CLIP model on webdataset shards."""

    data: DataConfig = field(default_factory=DataConfig)
    """Training data."""

    steps: int | None = None
    """Optimizer steps of the whole run; or give --epochs."""

    epochs: float | None = None
    """Passes over the data of the whole run; or give --steps."""

    global_batch_size: int = 1024
    """Pairs per optimizer step, over all ranks."""

    micro_batch_size: int | None = None
    """Pairs per forward and rank: less memory for one more forward. All at once when not given."""

    precision: Precision = "fp32"
    """Arithmetic of the encoders; loss and temperature are always fp32."""

    matmul_precision: Literal["highest", "high"] = "highest"
    """fp32 on a GPU: exact products, or in TF32 (high), as open_clip: several times faster, 10 bits
    of mantissa. The loss's Triton kernels keep fp32 either way."""

    strategy: StrategyName = "auto"
    """How ranks share the work. auto: zero with --deepspeed_config, ddp on several ranks, else
    single."""

    deepspeed_config: str | None = None
    """DeepSpeed JSON, such as ds_configs/zero2.json."""

    model: ModelConfig = field(default_factory=ModelConfig)
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    loss: LossConfig = field(default_factory=DiscoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    comm_hook: CommHookConfig = field(default_factory=CommHookConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    run_dir: str | None = None
    """Folder of this run; runs/NAME-DATE-TIME when not given. Must not exist unless resuming."""

    resume: str | None = None
    """Continue from a checkpoint: latest (of --run_dir), or the path of a run or checkpoint."""

    log_every_steps: int = 10
    """Steps between two lines of metrics.jsonl."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when the loss is NaN or infinite; either way that batch changes nothing."""

    max_skipped_steps: int = 100
    """Stop when more optimizer steps than this are skipped in a row."""

    plan: bool = True
    """Print the planner's memory and traffic at the start, and what was measured at the end."""

    plateau_reports: int = 20
    """Warn once when the loss stays within 1 % of chance for so many logged steps after warm-up."""

    seed: int = 0
    """Seed of initial weights, data order and dropout."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    timeout_seconds: float = 1800.0
    """A collective that waits longer than this ends the run."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of --steps and --epochs")
        for name in ("steps", "epochs", "micro_batch_size", "log_every_steps", "timeout_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name} {value}: must be positive")
        if self.max_skipped_steps < 0:
            raise ValueError(f"--max_skipped_steps {self.max_skipped_steps}: must not be negative")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {2**32 - 1}")
        for name, number in _numbers(self):
            if not math.isfinite(number):
                raise ValueError(f"--{name} {number}: must be a finite number")
        if self.global_batch_size < 2:
            raise ValueError(
                f"--global_batch_size {self.global_batch_size}: a contrastive loss needs at least "
                "2 pairs, one is the other's negative"
            )
        if self.resume == "latest" and self.run_dir is None:
            raise ValueError("--resume latest needs --run_dir, the folder of the run to continue")


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Dotted names and values of all settings that are floating-point numbers."""
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{name}.")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                yield name, number


def local_batch_size(config: TrainConfig, world_size: int) -> int:
    """Pairs per rank and step.

    Raises:
        ValueError: the global batch cannot be split evenly, naming the nearest ones that can.
    """
    size, rest = divmod(config.global_batch_size, world_size)
    if rest:
        nearest = [n * world_size for n in (size, size + 1) if n]
        raise ValueError(
            f"--global_batch_size {config.global_batch_size} does not divide by {world_size} "
            f"ranks: use {' or '.join(map(str, nearest))}"
        )
    return size


def leaves(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and types of all settings; those of every member of a union."""
    for name, hint in typing.get_type_hints(cls).items():
        options = options_of(hint)
        for option in options:
            yield from leaves(option, f"{prefix}{name}.")
        if not options:
            yield f"{prefix}{name}", hint


def suggest(name: str, known: Iterable[str], *, list_all: bool = True) -> str:
    """The nearest known name, or all of them, in words."""
    choices = sorted(set(known))
    if near := difflib.get_close_matches(name, choices, n=1, cutoff=0.5 if list_all else 0.75):
        return f"unknown; did you mean {near[0]}?"
    return f"unknown; known are {', '.join(choices)}" if list_all else "unknown; see --help"


def read_config(path: Path) -> TrainConfig:
    """A configuration file: a run's ``config.json``, or any part of one over the defaults.

    Raises:
        ValueError: no such file, not JSON, an unknown key (naming the nearest), a wrong value.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: cannot read it ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--config {path}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    try:
        return typing.cast(TrainConfig, from_plain(TrainConfig, content))
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from error


def from_plain(cls: Any, content: Any, where: str = "") -> Any:
    """Build a configuration dataclass from plain JSON values; absent keys keep their defaults.

    Raises:
        ValueError: naming the key.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where or 'the file'} must be an object {{...}}, is {content!r}")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values = {}
    for key, value in content.items():
        if key not in known:
            raise ValueError(f"key {where}{key}: {suggest(key, known)}")
        values[key] = _from_plain_value(hints[key], value, f"{where}{key}")
    try:
        return cls(**values)
    except TypeError as error:
        missing = str(error).rsplit(": ", 1)[-1]
        raise ValueError(f"key missing: {where}{missing}") from error


def _from_plain_value(hint: Any, value: Any, where: str) -> Any:
    options = options_of(hint)
    if not options:
        return _validated(hint, value, where)
    if len(options) == 1:
        return from_plain(options[0], value, f"{where}.")
    by_name = {fixed_name(option): option for option in options}
    name = value.get("name") if isinstance(value, dict) else None
    if name not in by_name:
        raise ValueError(f"key {where}.name: {name!r} {suggest(str(name), by_name)}")
    return from_plain(by_name[name], value, f"{where}.")


def options_of(hint: Any) -> list[Any]:
    """The dataclasses that a type names: itself, or the members of a union."""
    parts = typing.get_args(hint) if _is_union(hint) else (hint,)
    bare = [typing.get_args(p)[0] if typing.get_origin(p) is Annotated else p for p in parts]
    return [part for part in bare if dataclasses.is_dataclass(part)]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def fixed_name(option: Any) -> str:
    """By which name a member of a union is chosen."""
    return next(str(f.default) for f in dataclasses.fields(option) if f.name == "name")


def _validated(hint: Any, value: Any, where: str) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        detail = error.errors()[0]
        raise ValueError(f"key {where}: {value!r}: {detail['msg']}") from error
