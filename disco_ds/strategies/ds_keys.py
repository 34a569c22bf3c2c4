"""The keys of a DeepSpeed JSON: those passed on, and those refused with the reason.

Taken from DeepSpeed 0.19.8. DeepSpeed itself ignores a misspelt top-level key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP_LEVEL = _words(
    """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    bf16 fp16 torch_autocast data_types communication_data_type zero_optimization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown
    memory_breakdown dump_state log_level disable_python_gc comms_logger flops_profiler aio
    tensorboard wandb comet csv_monitor monitor_config checkpoint sparse_gradients
    disable_allgather use_data_before_expert_parallelism dataloader_drop_last timers disco
    """
)
ZERO = _words(
    """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
    allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm
    load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer sub_group_size
    stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
    stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients
    parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks leaf_module
    """
)
# Counts of elements.
SIZES = _words("reduce_bucket_size allgather_bucket_size sub_group_size")
SIZES_OR_ZERO = _words(
    """
    stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    """
)
WIRE = ("fp32", "bf16", "fp16")
_SCALE = "the gradient scale belongs to the loss; remove the key"
_OPTIM = "the optimizer is set with --optim.* ; remove the key"
REFUSED = {
    "optimizer": _OPTIM,
    "scheduler": _OPTIM,
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's, nothing is compiled; remove the key",
    "amp": "use --precision bf16 and remove the key",
    "prescale_gradients": _SCALE,
    "gradient_predivide_factor": _SCALE,
    "gradient_allreduce_op": _SCALE,
    "managed_gradient_accumulation": "micro-batches are set with --micro_batch_size; remove it",
    "sequence_parallel_size": "contrastive losses need one sample per row; remove the key",
    "tensor_parallel": "not supported; remove the key",
    "pipeline": "not supported; remove the key",
    "compile": "DeepCompile reduces gradients its own way; use --engine.compile instead",
    "activation_checkpointing": "use --model.activation_checkpointing and remove the key",
    "elasticity": "removed from DeepSpeed; checkpoints here resume on any number of ranks",
}
REFUSED_ZERO = {
    "zero_quantized_gradients": "not supported with exact gradients; remove the key",
    "zero_hpz_partition_size": "not tested with this step; remove the key",
    "zenflow": "delays gradients, which the loss cannot allow; remove the key",
    "cpu_offload": 'deprecated by DeepSpeed; use "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'deprecated by DeepSpeed; use "offload_param": {"device": "cpu"}',
}


def check_keys(source: str, config: Mapping[str, Any]) -> None:
    """Refuse keys that are unknown or that this package decides itself.

    Raises:
        ValueError: naming the key, and the nearest known one or the remedy.
    """
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f'{source}: "zero_optimization" must be an object with a "stage"')
    _check_section(source, config, TOP_LEVEL, REFUSED)
    _check_section(f"{source}: zero_optimization", zero, ZERO, REFUSED_ZERO)
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f'{source}: "stage" is {stage!r}, must be 0, 1, 2 or 3')
    _check_objects(source, config, ("bf16", "fp16", "torch_autocast", "data_types"))
    _check_objects(f"{source}: zero_optimization", zero, ("offload_param", "offload_optimizer"))
    for key, value in zero.items():
        lowest = 1 if key in SIZES else 0
        if key in SIZES | SIZES_OR_ZERO and not (_is_number(value) and value >= lowest):
            raise ValueError(
                f'{source}: zero_optimization: "{key}" is {value!r}, must be a number, at least '
                f"{lowest}; leave it out for DeepSpeed's own"
            )
    wire = config.get("communication_data_type")
    if wire is not None and str(wire).lower() not in WIRE:
        raise ValueError(
            f'{source}: "communication_data_type" is {wire!r}, known are {", ".join(WIRE)}'
        )
    clipping = config.get("gradient_clipping")
    if clipping not in (None, "auto") and not _is_number(clipping):
        raise ValueError(f'{source}: "gradient_clipping" is {clipping!r}, must be a number')


def _check_objects(source: str, section: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if not isinstance(section.get(key) or {}, dict):
            raise ValueError(
                f'{source}: "{key}" is {section[key]!r}, must be an object {{...}} as DeepSpeed '
                "has it"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _check_section(
    source: str, section: Mapping[str, Any], known: Iterable[str], refused: Mapping[str, str]
) -> None:
    for key, value in section.items():
        if key in refused:
            if not _is_harmless(key, value):
                raise ValueError(f'{source}: "{key}": {refused[key]}')
        elif key not in known:
            near = difflib.get_close_matches(key, [*known, *refused], n=1)
            hint = f'did you mean "{near[0]}"?' if near else "remove it"
            raise ValueError(f'{source}: "{key}" is no key of DeepSpeed that is known here; {hint}')


def _is_harmless(key: str, value: object) -> bool:
    """A refused key may say what holds anyway."""
    if key == "managed_gradient_accumulation":
        return value is True
    if isinstance(value, dict):
        return not value or value.get("deepcompile") is False
    if isinstance(value, bool):
        return not value
    return value in (None, 1, "mean")
