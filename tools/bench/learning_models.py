"""What is trained: two heads on frozen towers, or a small CLIP from scratch; both answer to rows.

``encode(pictures, concepts)`` takes rows of the data set and returns features ``[b, d]``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from learning_data import Emoji, load
from learning_features import load_features
from learning_rows import Form
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "data" / "bench" / "emoji_artists"
CONFIG = ROOT / "disco_ds" / "model_configs" / "disco-demo-rn.json"
VALIDATION = "emojione"
TESTS = ("openmoji", "twemoji")
TRAINED = ("noto", "noto-v1", "emojione-v1", "fluent-flat", "fluent-3d")
WIDTH = 512  # of the heads
DIM = 256
SHIFT = 4  # pixels of 64, either way, while training from scratch


@cache
def emoji() -> Emoji:
    """The data set, read once per process."""
    return load(FOLDER)


@cache
def features() -> tuple[Tensor, Tensor]:
    """Of all pictures and all names, from the frozen towers; read once per process."""
    found = load_features(emoji(), FOLDER, TRAINED)
    return found.images, found.texts


class Heads(nn.Module):
    """Two layers on each frozen tower."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = features()
        self.image, self.text = (_head(given.shape[1]) for given in self.inputs)

    def encode(self, pictures: Tensor, concepts: Tensor) -> tuple[Tensor, Tensor]:
        """Features of pictures and of names, each ``[b, 256]``."""
        images, texts = self.inputs
        image_features: Tensor = self.image(images[pictures])
        text_features: Tensor = self.text(texts[concepts])
        return image_features, text_features


def _head(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, WIDTH), nn.GELU(), nn.Linear(WIDTH, DIM))


class Scratch(nn.Module):
    """The demo's ResNet at 64 px; its text tower knows only the tokens that occur."""

    def __init__(self) -> None:
        super().__init__()
        import open_clip

        config: dict[str, Any] = json.loads(CONFIG.read_text())
        self.pixels = _pixels_64()
        self.tokens, config["text_cfg"]["vocab_size"] = _tokens(
            emoji().names, config["text_cfg"]["context_length"]
        )
        self.clip = open_clip.CLIP(**config)

    def encode(self, pictures: Tensor, concepts: Tensor) -> tuple[Tensor, Tensor]:
        """Features of pictures (shifted a little while training) and of names."""
        images = self.pixels[pictures]
        if self.training:
            images = _shifted(images)
        images = (images.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
        images = images.contiguous(memory_format=torch.channels_last)
        image_features: Tensor = self.clip.encode_image(images)
        text_features: Tensor = self.clip.encode_text(self.tokens[concepts])
        return image_features, text_features


@cache
def _pixels_64() -> Tensor:
    parts = torch.from_numpy(np.array(emoji().pixels)).split(256)
    halves = [F.avg_pool2d(part.permute(0, 3, 1, 2).float(), 2) for part in parts]
    return torch.cat([half.round().byte().permute(0, 2, 3, 1) for half in halves])


def _tokens(names: tuple[str, ...], length: int) -> tuple[Tensor, int]:
    """Tokens ``[n, length]`` numbered without gaps, and how many there are.

    The order stays: open_clip finds the end of a text by its largest number.
    """
    import open_clip

    tokens = open_clip.SimpleTokenizer(context_length=length)(list(names))
    used, places = torch.unique(tokens, return_inverse=True)
    return places, len(used)


def _shifted(images: Tensor) -> Tensor:
    """Moved by up to 4 pixels either way, on white; ``[b, 64, 64, 3]``."""
    count, size = images.shape[:2]
    padded = F.pad(images, (0, 0, SHIFT, SHIFT, SHIFT, SHIFT), value=255)
    start = torch.randint(2 * SHIFT + 1, (2, count, 1))
    rows, columns = start + torch.arange(size)
    return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def build(form: Form) -> Heads | Scratch:
    """A new model; call ``torch.manual_seed`` before."""
    return Heads() if form == "heads" else Scratch()
