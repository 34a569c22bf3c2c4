"""Reads a DeepSpeed JSON, checks it against the configuration and fills what it says "auto" for.

Batch sizes, precision and clipping belong to the configuration. The file says "auto" for them,
leaves them out, or agrees; a contradiction stops the run with both numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco_ds.strategies.config import Precision

AUTO = (None, "auto")
NOT_OURS = {
    "optimizer": "the optimizer is set with --optim.* ; remove the section",
    "scheduler": "the schedule is set with --optim.* ; remove the section",
    "amp": "use --precision bf16 and remove the section",
    "prescale_gradients": "the gradient scale belongs to the loss; remove the key",
    "gradient_predivide_factor": "the gradient scale belongs to the loss; remove the key",
    "sequence_parallel_size": "contrastive losses need one sample per row; remove the key",
    "compile": "DeepCompile reduces gradients its own way and is not supported; remove the section",
}
NOT_OURS_ZERO = {
    "zero_quantized_gradients": "not supported with exact gradients; remove the key",
    "zero_hpz_partition_size": "not tested with this step; remove the key",
}
HARMLESS: tuple[Any, ...] = (None, False, 1, 1.0, {})


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


def resolve_ds_config(source: str, given: Mapping[str, Any], run: RunNumbers) -> dict[str, Any]:
    """The configuration handed to ``deepspeed.initialize``: every shared number explicit.

    Args:
        source: name of the file, for messages.
        given: its content.
        run: the numbers of the run.

    Raises:
        ValueError: a key contradicts the run or is not supported, naming key and values.
    """
    config: dict[str, Any] = json.loads(json.dumps(given))
    _refuse_foreign(source, config)
    _check_batch(source, config, run)
    _check_precision(source, config, run)
    _check_clipping(source, config, run)
    config["train_batch_size"] = run.global_batch_size
    # One engine step is one optimizer step: micro-batches are ours, not the engine's.
    config["train_micro_batch_size_per_gpu"] = run.local_batch_size
    config["gradient_accumulation_steps"] = 1
    config["gradient_clipping"] = run.max_grad_norm or 0.0
    config["bf16"] = {**config.get("bf16", {}), "enabled": run.precision == "bf16"}
    config.setdefault("communication_data_type", "fp32")
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    # On, stage 3 replaces torch.nn.functional.linear for the whole process, with other rounding.
    config["zero_optimization"].setdefault("memory_efficient_linear", False)
    config["zero_allow_untested_optimizer"] = True
    return config


def _refuse_foreign(source: str, config: dict[str, Any]) -> None:
    if "disco" in config:
        raise ValueError(f'{source}: "disco" hooks are not available in this release')
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f'{source}: "zero_optimization" must be an object with a "stage"')
    for section, refused in ((config, NOT_OURS), (zero, NOT_OURS_ZERO)):
        for key, reason in refused.items():
            value = section.get(key)
            if isinstance(value, dict) and not value.get("deepcompile", True):
                continue
            if value not in HARMLESS:
                raise ValueError(f'{source}: "{key}": {reason}')
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise ValueError(f'{source}: "stage" is {zero["stage"]!r}, must be 0, 1, 2 or 3')


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
    if micro in AUTO:
        return
    per_rank = micro * (1 if steps in AUTO else steps)
    allowed = (
        (run.local_batch_size,)
        if steps not in AUTO
        else (
            run.local_batch_size,
            run.micro_batch_size,
        )
    )
    if per_rank not in allowed:
        product = f"{micro}" if steps in AUTO else f"{micro} x {steps} = {per_rank}"
        raise ValueError(
            f'{source}: "train_micro_batch_size_per_gpu" x "gradient_accumulation_steps" is '
            f"{product} per rank, but {ours} (micro-batches of {run.micro_batch_size}); {remedy}"
        )


def _check_precision(source: str, config: dict[str, Any], run: RunNumbers) -> None:
    for key, wanted in (("bf16", run.precision == "bf16"), ("fp16", False)):
        enabled = config.get(key, {}).get("enabled", "auto")
        if enabled not in AUTO and enabled != wanted:
            raise ValueError(
                f'{source}: "{key}": {{"enabled": {json.dumps(enabled)}}}, but --precision is '
                f"{run.precision}; "
                + ("fp16 is not supported, use bf16" if key == "fp16" else 'say "auto" in the file')
            )
    config.pop("fp16", None)
    if run.precision == "bf16" and config["zero_optimization"].get("stage", 0) == 0:
        raise ValueError(
            f'{source}: "stage": 0 with --precision bf16: DeepSpeed takes a hidden first step '
            "there, so the update is not AdamW's; use stage 1, or --precision fp32"
        )


def _check_clipping(source: str, config: dict[str, Any], run: RunNumbers) -> None:
    clipping = config.get("gradient_clipping")
    if clipping not in AUTO and float(clipping) != (run.max_grad_norm or 0.0):
        ours = "off" if run.max_grad_norm is None else f"{run.max_grad_norm:g}"
        raise ValueError(
            f'{source}: "gradient_clipping" is {clipping}, but --optim.max_grad_norm is {ours}; '
            'say "auto" in the file, or give the same number'
        )
