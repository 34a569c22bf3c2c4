"""The feature plane: how the other ranks' part of a feature gradient arrives.

All three give the same gradients; :class:`~disco_ds.losses.DiscoLoss` lists the bytes of each.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from disco_ds.comm_hooks.base import CommHook, Undo


class _FeatureReduction(CommHook):
    """Sets a loss's way of communicating, its wire dtype and its group.

    Args:
        wire_dtype: dtype of features on the wire; None leaves the loss's own.
    """

    gradient_reduction: ClassVar[str]

    def __init__(self, *, wire_dtype: torch.dtype | None = None) -> None:
        self.wire_dtype = wire_dtype

    def bind(self, loss: nn.Module, process_group: dist.ProcessGroup | None) -> Undo:
        """Bind to the ranks over which the engine averages: their number is the gradient scale.

        Raises:
            ValueError: the loss has no such way, naming both.
        """
        wanted = self._settings(loss, process_group)
        missing = object()
        before = {name: getattr(loss, name, missing) for name in wanted}
        if missing in before.values():
            raise ValueError(
                f"{type(self).__name__} needs a loss of disco_ds.losses, got {type(loss).__name__}"
            )
        _set(loss, wanted)
        return lambda: _set(loss, before)

    def _settings(
        self, loss: nn.Module, process_group: dist.ProcessGroup | None
    ) -> dict[str, object]:
        settings: dict[str, object] = {"process_group": process_group}
        if self.wire_dtype is not None:
            settings["wire_dtype"] = self.wire_dtype
        if hasattr(loss, "gradient_reduction"):
            settings["gradient_reduction"] = self.gradient_reduction
            self._check_ring(loss)
        elif self.gradient_reduction != "scalar_gather":
            raise ValueError(
                f"{type(self).__name__}: {type(loss).__name__} sends no feature gradients at all; "
                "use FastCLIPReduction (name: fastclip)"
            )
        return settings

    def _check_ring(self, loss: Any) -> None:
        if loss.gather == "ring" and self.gradient_reduction != "scalar_gather":
            raise ValueError(
                f'{type(self).__name__} needs a loss with gather="all"; with gather="ring" use '
                "FastCLIPReduction (name: fastclip)"
            )


def _set(loss: nn.Module, settings: dict[str, object]) -> None:
    for name, value in settings.items():
        setattr(loss, name, value)


class FastCLIPReduction(_FeatureReduction):
    """Scalars travel, feature gradients do not (arXiv 2407.01445), made exact for InfoNCE."""

    gradient_reduction = "scalar_gather"


class OpenCLIPReduction(_FeatureReduction):
    """Feature gradients are reduce-scattered: open_clip's local_loss with gather_with_grad."""

    gradient_reduction = "reduce_scatter"


class DiscoReduction(_FeatureReduction):
    """Feature gradients are all-reduced, as in DisCo-CLIP (arXiv 2304.08480): twice the bytes."""

    gradient_reduction = "all_reduce"
