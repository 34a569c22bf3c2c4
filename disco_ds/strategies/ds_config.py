"""Reads a DeepSpeed JSON, checks it against the configuration and fills what it says "auto" for.

Batch sizes, precision and clipping belong to the configuration. The file says "auto" for them,
leaves them out, or agrees; a contradiction stops the run with both numbers.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_ds.comm_hooks import CommHookConfig
from disco_ds.strategies.config import Precision
from disco_ds.strategies.ds_keys import check_keys

AUTO = (None, "auto")
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class RunNumbers:
    """What the configuration decides and the DeepSpeed JSON must agree with."""

    global_batch_size: int
    world_size: int
    micro_batch_size: int
    precision: Precision
    max_grad_norm: float | None

    @property
    def local_batch_size(self) -> int:
        """Pairs per rank and step."""
        return self.global_batch_size // self.world_size

    @property
    def num_micro_batches(self) -> int:
        """Forward passes with gradients per rank and step."""
        return -(-self.local_batch_size // self.micro_batch_size)


def read_ds_config(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ValueError: no such file, not JSON (with line and column), or not an object.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(
            f"--deepspeed_config {path}: cannot read it ({error.strerror}); "
            "ds_configs/ holds ready ones, such as ds_configs/zero2.json"
        ) from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--deepspeed_config {path}: not JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"--deepspeed_config {path}: holds a {type(content).__name__}, not {{...}}"
        )
    return content


def read_comm_hook(source: str, given: Mapping[str, Any]) -> CommHookConfig | None:
    """The communication hook in the ``"disco"`` section, or None without one.

    Raises:
        ValueError: naming the key and the nearest known one, or the wrong value.
    """
    section = given.get("disco")
    if section is None:
        return None
    if not isinstance(section, dict) or set(section) - {"comm_hook"}:
        raise ValueError(f'{source}: "disco" must be {{"comm_hook": {{...}}}}, is {section!r}')
    hook = section.get("comm_hook", {})
    if not isinstance(hook, dict):
        raise ValueError(f'{source}: disco.comm_hook must be an object, such as {{"name": ...}}')
    known = [field.name for field in dataclasses.fields(CommHookConfig)]
    for key in hook:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ValueError(
                f'{source}: disco.comm_hook: "{key}" is unknown; did you mean "{near[0]}"?'
            )
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(CommHookConfig).validate_json(json.dumps(hook), strict=True)
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(str(part) for part in ("disco.comm_hook", *detail["loc"]))
        raise ValueError(f"{source}: {where}: {detail['input']!r}: {detail['msg']}") from error


def resolve_ds_config(source: str, given: Mapping[str, Any], run: RunNumbers) -> dict[str, Any]:
    """The configuration handed to ``deepspeed.initialize``: every shared number explicit.

    Args:
        source: name of the file, for messages.
        given: its content.
        run: the numbers of the run.

    Raises:
        ValueError: a key is unknown, contradicts the run or is not supported, naming key and
            values.
    """
    check_keys(source, given)
    config: dict[str, Any] = json.loads(json.dumps(given))
    config.pop("disco", None)
    zero = config.setdefault("zero_optimization", {})
    _check_batch(source, config, run)
    _check_clipping(source, config, run)
    _resolve_precision(source, config, run.precision)
    config["train_batch_size"] = run.global_batch_size
    # One engine step is one optimizer step: micro-batches are ours, not the engine's.
    config["train_micro_batch_size_per_gpu"] = run.local_batch_size
    config["gradient_accumulation_steps"] = 1
    config["gradient_clipping"] = run.max_grad_norm or 0.0
    config.setdefault("communication_data_type", "fp32")
    # On, stage 3 replaces torch.nn.functional.linear for the whole process, with other rounding.
    zero.setdefault("memory_efficient_linear", False)
    config["zero_force_ds_cpu_optimizer"] = False
    config["zero_allow_untested_optimizer"] = True
    return config


def _resolve_precision(source: str, config: dict[str, Any], precision: Precision) -> None:
    """Make exactly one of bf16, fp16 and torch_autocast say what --precision says."""
    autocast = config.get("torch_autocast", {})
    # A file with this section wants fp32 weights, cast operation by operation.
    by_autocast = autocast.get("enabled", False) in (True, "auto") and precision != "fp32"
    _agree(source, "torch_autocast", autocast, by_autocast, precision)
    if by_autocast and autocast.get("dtype", "auto") not in ("auto", DTYPE_NAMES[precision]):
        raise ValueError(
            f'{source}: "torch_autocast": "dtype" is {autocast["dtype"]!r}, but --precision is '
            f'{precision}; say "auto" in the file'
        )
    if by_autocast and precision == "fp16":
        raise ValueError(
            f'{source}: "torch_autocast" with --precision fp16: DeepSpeed does not tell of steps '
            'it skips there; use "fp16" at stage 1 or higher, or --precision bf16'
        )
    for key in ("bf16", "fp16"):
        enabled = precision == key and not by_autocast
        _agree(source, key, config.get(key, {}), enabled, precision)
        config[key] = {**config.get(key, {}), "enabled": enabled}
    if by_autocast:
        config["torch_autocast"] = {**autocast, "enabled": True, "dtype": DTYPE_NAMES[precision]}
    else:
        config.pop("torch_autocast", None)
        _refuse_half_at_stage_0(source, config, precision)


def _agree(
    source: str, key: str, section: Mapping[str, Any], wanted: bool, precision: Precision
) -> None:
    enabled = section.get("enabled", "auto")
    if enabled not in AUTO and enabled != wanted:
        raise ValueError(
            f'{source}: "{key}": {{"enabled": {json.dumps(enabled)}}}, but --precision is '
            f'{precision}; say "auto" in the file'
        )


def _refuse_half_at_stage_0(source: str, config: Mapping[str, Any], precision: Precision) -> None:
    if precision != "fp32" and config["zero_optimization"].get("stage", 0) == 0:
        raise ValueError(
            f'{source}: "stage": 0 with --precision {precision}: DeepSpeed takes a hidden first '
            "step there, so the update is not AdamW's; use stage 1, or say "
            '"torch_autocast": {"enabled": "auto"} in the file'
        )


def _check_batch(source: str, config: dict[str, Any], run: RunNumbers) -> None:
    """train_batch_size = micro x accumulation x ranks must hold here and in the configuration."""
    total = config.get("train_batch_size")
    micro = config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps")
    for key, value in (
        ("train_batch_size", total),
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", steps),
    ):
        if value not in AUTO and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f'{source}: "{key}" is {value!r}, must be a whole number or "auto"')
    ours = (
        f"--global_batch_size {run.global_batch_size} on {run.world_size} ranks is "
        f"{run.local_batch_size} per rank"
    )
    remedy = 'say "auto" in the file, or change --global_batch_size'
    if total not in AUTO and total != run.global_batch_size:
        raise ValueError(f'{source}: "train_batch_size" is {total}, but {ours}; {remedy}')
    if steps not in AUTO and steps > 1 and steps != run.num_micro_batches:
        raise ValueError(
            f'{source}: "gradient_accumulation_steps" is {steps}, but {ours}, which is '
            f"{run.num_micro_batches} micro-batch(es) of {run.micro_batch_size}; say "
            f'"auto" in the file, or --micro_batch_size {max(1, run.local_batch_size // steps)}'
        )
    if micro in AUTO:
        return
    per_rank = micro * (1 if steps in AUTO else steps)
    allowed = {run.local_batch_size} | ({run.micro_batch_size} if steps in AUTO else set())
    if per_rank not in allowed:
        product = f"{micro}" if steps in AUTO else f"{micro} x {steps} = {per_rank}"
        raise ValueError(
            f'{source}: "train_micro_batch_size_per_gpu" x "gradient_accumulation_steps" is '
            f"{product} per rank, but {ours} (micro-batches of {run.micro_batch_size}); {remedy}"
        )


def _check_clipping(source: str, config: dict[str, Any], run: RunNumbers) -> None:
    clipping = config.get("gradient_clipping")
    if clipping not in AUTO and float(clipping) != (run.max_grad_norm or 0.0):
        ours = "off" if run.max_grad_norm is None else f"{run.max_grad_norm:g}"
        raise ValueError(
            f'{source}: "gradient_clipping" is {clipping}, but --optim.max_grad_norm is {ours}; '
            'say "auto" in the file, or give the same number'
        )
