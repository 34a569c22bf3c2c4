"""The repeated blocks of the towers: the unit of sharding, recomputation and compilation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# open_clip's transformers, timm's, Hugging Face's, and the stages of a ResNet.
_CONTAINER = re.compile(r"(^|\.)(resblocks|blocks|layers?|layer\d)$")


def transformer_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks of a model, in its own order."""
    blocks: list[nn.Module] = []
    inside: tuple[str, ...] = ()
    for name, child in module.named_modules():
        if not isinstance(child, (nn.ModuleList, nn.Sequential)) or not _CONTAINER.search(name):
            continue
        if name.startswith(inside):
            continue
        inside += (f"{name}.",)
        blocks.extend(child.children())
    return blocks


def checkpoint_blocks_(blocks: Sequence[nn.Module], *, every: int = 1) -> int:
    """Recompute every ``every``-th block in the backward pass; returns how many are.

    Non-reentrant: the reentrant form reduces gradients twice under ZeRO and breaks DDP. Blocks
    with BatchNorm are left alone, or a batch would enter the running statistics twice.
    """
    chosen = [
        block
        for block in blocks[every - 1 :: every]
        if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in block.modules())
    ]
    for block in chosen:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(chosen)


def compile_blocks_(blocks: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """torch.compile every block.

    A block that is recomputed in the backward pass is compiled inside the recomputation, so it
    does not matter which of the two comes first in the configuration.
    """
    for block in blocks:
        forward = block.forward
        if isinstance(forward, partial) and forward.func is checkpoint:
            compiled = torch.compile(forward.args[0], backend=backend)
            block.forward = partial(checkpoint, compiled, **forward.keywords)
        else:
            block.forward = torch.compile(forward, backend=backend)
