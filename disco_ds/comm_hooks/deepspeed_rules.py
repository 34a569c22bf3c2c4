"""DeepSpeed engines that a hook cannot serve, refused with the key to change."""

from __future__ import annotations

import warnings
from typing import Any


def check_engine(engine: Any) -> None:
    """Check that all gradients of an engine take the one way that hooks see, at a known scale.

    Raises:
        ValueError: naming the DeepSpeed key and the remedy.
    """
    for key, is_set, remedy in _refused(engine):
        if is_set:
            raise ValueError(f'communication hooks do not work with "{key}": {remedy}')
    if engine.zero_optimization_stage() == 0 and (
        engine.bfloat16_enabled() or engine.fp16_enabled()
    ):
        warnings.warn(
            "DeepSpeed stage 0 with bf16 or fp16 takes a hidden first optimizer step: the update "
            "is not AdamW's; use stage 1",
            stacklevel=3,
        )


def _refused(engine: Any) -> list[tuple[str, bool, str]]:
    stage = engine.zero_optimization_stage()
    scaled = engine._config.prescale_gradients or engine._config.gradient_predivide_factor != 1.0
    remove = "remove the key"
    return [
        ("compile", bool(engine.is_deepcompile_enabled()), "turn deepcompile off"),
        ("zero_quantized_gradients", bool(engine.zero_quantized_gradients()), remove),
        ("sequence_parallel_size", engine.sequence_parallel_size > 1, remove),
        ("gradient_allreduce_op", not engine.gradient_average, 'use "mean"'),
        ("gradient_predivide_factor", stage == 3 and scaled, "stage 3 misscales with it"),
        ("moe", bool(engine.has_moe_layers), "experts are reduced in other groups"),
        ("pipeline", bool(engine.pipeline_parallelism), "pipelines reduce their own way"),
        ("zero.Init", _made_under_zero_init(engine, stage), "build the model without it"),
    ]


def _made_under_zero_init(engine: Any, stage: int) -> bool:
    return stage < 3 and any(hasattr(parameter, "ds_id") for parameter in engine.parameters())
