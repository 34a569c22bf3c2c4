"""Parameter gradients in 16 bits on the wire."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from disco_ds.comm_hooks.base import CommHook, Reduction


class CompressedReduction(CommHook):
    """Round what this rank contributes; the collective sums in the same dtype.

    One step's gradient is off by a relative ``2^-8`` (bf16) or ``2^-11`` (fp16) per rounding, one
    before the collective and one per addition in it. With ``error_feedback`` what rounding took
    away from this rank's contribution is added to its next one, so that it does not add up over
    steps; costs one fp32 copy of the gradients. Errors of gradients that an engine groups anew (DDP
    after its first step) are dropped. fp16 overflows at 65504.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        error_feedback: keep the rounding error for the next step.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, error_feedback: bool = True) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"CompressedReduction: dtype {dtype} is not 16 bits of float")
        self.dtype = dtype
        self.error_feedback = error_feedback
        self._errors: dict[str, tuple[str, Tensor]] = {}  # by key: layout, error

    def check(self, *, fp16: bool) -> None:
        """Refuse error feedback under a loss scale: the errors of two steps would not add up."""
        if fp16 and self.error_feedback:
            raise ValueError(
                "CompressedReduction with fp16 training: the loss scale changes between steps; "
                "set error_feedback false or train in bf16"
            )

    def reduce(self, reduction: Reduction) -> None:
        """Send a rounded copy."""
        exact = reduction.input
        if exact.dtype == self.dtype:
            reduction.send()
            return
        if not self.error_feedback:
            reduction.send(exact.to(self.dtype))
            return
        key = str(reduction.key)
        layout, error = self._errors.get(key, ("", None))
        if error is not None and layout == reduction.layout and error.shape == exact.shape:
            exact = exact + error.to(exact)
        rounded = exact.to(self.dtype)
        # The padding of a reduce-scatter may be NaN: it must not stay.
        error = (exact - rounded).nan_to_num_(0.0, 0.0, 0.0)
        self._errors[key] = (reduction.layout, error)
        reduction.send(rounded)

    def state(self) -> dict[str, Tensor]:
        """The rounding errors to add to the next step's gradients."""
        return {f"{key}@{layout}": error for key, (layout, error) in self._errors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue with another run's errors."""
        split = {name.rpartition("@")[::2]: error for name, error in state.items()}
        self._errors = {key: (layout, error) for (key, layout), error in split.items()}
