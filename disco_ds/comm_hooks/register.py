"""Puts a hook on whatever a user trains with."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from disco_ds.comm_hooks.base import CommHook
from disco_ds.comm_hooks.torch_native import fsdp2_mesh, register_ddp, register_fsdp2


class HookHandle:
    """What a registration hands back."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Leave engine and loss as they were; a second call does nothing."""
        self._undo.close()


def register_comm_hook(
    engine_or_model: Any, hook: CommHook, *, loss: nn.Module | None = None
) -> HookHandle:
    """Let ``hook`` decide how the gradients of an engine, and of a loss, travel.

    Args:
        engine_or_model: a DeepSpeed engine (also one that accelerate made), or a model wrapped in
            DistributedDataParallel or fully_shard.
        hook: several are one by :func:`compose`.
        loss: a loss of :mod:`disco_ds.losses` to bind to the engine's ranks. Hooks of the feature
            plane do nothing without one.

    Raises:
        ValueError: the combination does not work, naming what to change.
    """
    with ExitStack() as undo:
        fp16 = False
        group = dist.group.WORLD
        if _is_deepspeed(engine_or_model):
            from disco_ds.comm_hooks.deepspeed import register_deepspeed

            fp16 = engine_or_model.fp16_enabled()
            group = engine_or_model.seq_data_parallel_group
            undo.callback(register_deepspeed(engine_or_model, hook))
        elif isinstance(engine_or_model, DistributedDataParallel):
            group = engine_or_model.process_group
            undo.callback(register_ddp(engine_or_model, hook))
        elif isinstance(engine_or_model, FSDPModule):
            undo.callback(register_fsdp2(engine_or_model, hook))
            group = fsdp2_mesh(engine_or_model).get_group()
        else:
            raise ValueError(
                f"no communication to hook in a {type(engine_or_model).__name__}: give a DeepSpeed "
                "engine, or a model wrapped in DistributedDataParallel or fully_shard"
            )
        hook.check(fp16=fp16)
        if loss is not None:
            undo.callback(hook.bind(loss, group))
        return HookHandle(undo.pop_all())


def _is_deepspeed(engine: Any) -> bool:
    """Asked by name: users without DeepSpeed need not have it."""
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(engine).__mro__)
