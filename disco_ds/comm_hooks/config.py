"""Hooks by name, for the command line and for the ``"disco"`` section of a DeepSpeed JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from disco_ds.comm_hooks.base import CommHook, compose
from disco_ds.comm_hooks.compress import CompressedReduction
from disco_ds.comm_hooks.count import CountingHook
from disco_ds.comm_hooks.feature import DiscoReduction, FastCLIPReduction, OpenCLIPReduction

FEATURE_HOOKS = {
    "fastclip": FastCLIPReduction,
    "openclip": OpenCLIPReduction,
    "disco": DiscoReduction,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class CommHookConfig:
    """How gradients travel between ranks; nothing set means as loss and engine are configured."""

    name: Literal["fastclip", "openclip", "disco"] | None = None
    """Feature gradients: not sent but made from scalars (fastclip), reduce-scattered (openclip) or
    all-reduced (disco). Overrides the loss's gradient_reduction; same gradients, other bytes."""

    wire_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """With name: dtype of features on the wire, overrides the loss's."""

    compress: Literal["bf16", "fp16"] | None = None
    """Parameter gradients on the wire in 16 bits."""

    error_feedback: bool = True
    """With compress: carry rounding errors over to the next step."""

    count: bool = False
    """Log bytes and calls per step, plane and collective; always on with another hook."""

    def __post_init__(self) -> None:
        if self.wire_dtype is not None and self.name is None:
            raise ValueError(
                f"--comm_hook.wire_dtype {self.wire_dtype} needs --comm_hook.name; without a hook "
                "use --loss.wire_dtype"
            )

    def build(self) -> CommHook | None:
        """The hook, or None when nothing is set."""
        hooks: list[CommHook] = []
        if self.name is not None:
            wire = None if self.wire_dtype is None else DTYPES[self.wire_dtype]
            hooks.append(FEATURE_HOOKS[self.name](wire_dtype=wire))
        if self.compress is not None:
            dtype = DTYPES[self.compress]
            hooks.append(CompressedReduction(dtype, error_feedback=self.error_feedback))
        if not hooks and not self.count:
            return None
        return compose(*hooks, CountingHook())
