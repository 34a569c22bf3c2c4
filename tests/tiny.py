"""A very small CLIP and random pairs, equal on every rank that asks with the same seed."""

from __future__ import annotations

import torch

from disco_ds.blocks import checkpoint_blocks_, transformer_blocks
from disco_ds.grad_cache import Pairs
from disco_ds.models import Encoders

CONTEXT, VOCABULARY, IMAGE_SIZE = 6, 50, 16


def tiny_encoders(
    *,
    resnet: bool = False,
    seed: int = 0,
    patch_dropout: float = 0.0,
    checkpointing: bool = False,
) -> Encoders:
    from open_clip.model import CLIP

    vision = {"image_size": IMAGE_SIZE, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8}
    if resnet:
        vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}
    elif patch_dropout:
        vision["patch_dropout"] = patch_dropout
    text = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 16, "heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        clip = CLIP(embed_dim=8, vision_cfg=vision, text_cfg={**text, "layers": 2})
    del clip.logit_scale
    clip.logit_scale = None
    if checkpointing:
        checkpoint_blocks_(transformer_blocks(clip))
    return Encoders(clip)


def random_pairs(
    count: int, *, seed: int = 1, image_size: int = IMAGE_SIZE, dtype: torch.dtype = torch.float32
) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(count, 3, image_size, image_size, generator=generator).to(dtype)
    text = torch.randint(1, VOCABULARY, (count, CONTEXT), generator=generator)
    return Pairs(image, text, torch.arange(count))


def rows_of(pairs: Pairs, rank: int, world_size: int) -> Pairs:
    own = slice(rank * len(pairs.index) // world_size, (rank + 1) * len(pairs.index) // world_size)
    return Pairs(pairs.image[own], pairs.text[own], pairs.index[own])
