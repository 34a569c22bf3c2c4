"""What a user chooses about engines, besides a DeepSpeed JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
StrategyName = Literal["auto", "zero", "ddp", "fsdp2", "accelerate", "single"]


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine that spreads the encoders over ranks."""

    compile: bool = False
    """torch.compile every transformer block; not with ZeRO stage 3."""

    reduce_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch instead of once a step: more bytes on the wire, but
    no rank holds whole gradients. For ZeRO stages 2 and 3 and FSDP2."""

    reshard_after_forward: bool = True
    """FSDP2: give up gathered weights between forward and backward. False keeps them: one gather
    less per step, the whole model in memory."""

    cpu_offload: bool = False
    """FSDP2: keep parameters, gradients and optimizer state in host memory."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """FSDP2: dtype in which gradients are reduced when --precision is bf16 or fp16."""


ONLY_FOR = {
    "reduce_every_micro_batch": ("zero", "fsdp2", "accelerate"),
    "reshard_after_forward": ("fsdp2", "accelerate"),
    "cpu_offload": ("fsdp2", "accelerate"),
    "reduce_dtype": ("fsdp2", "accelerate"),
}
