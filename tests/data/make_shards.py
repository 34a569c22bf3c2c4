"""Small shards with samples that can be told apart: colour, caption and id of sample n agree."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from disco_ds.data.index import ShardIndex, build_index
from disco_ds.data.loader import Batch, DataConfig, TrainLoader
from disco_ds.distributed import World

Member = tuple[str, bytes]


def write_tar(path: Path, members: Iterable[Member]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def picture(number: int) -> bytes:
    """A lossless picture whose colour is the number."""
    return encode(Image.new("RGB", (8, 8), (number % 256, number // 256, 77)))


def photo(seed: int, size: tuple[int, int], format: str = "JPEG", **options: Any) -> bytes:
    """Smooth noise: compresses like a photograph."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1] // 16, size[0] // 16, 3))
    image = Image.fromarray(noise.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return encode(image, format, **options)


def pair(number: int, key: str | None = None, *, with_json: bool = False) -> list[Member]:
    key = f"{number:06d}" if key is None else key
    members = [(f"{key}.png", picture(number)), (f"{key}.txt", str(number).encode())]
    if with_json:
        members.append((f"{key}.json", json.dumps({"caption": str(number)}).encode()))
    return members


def make_shards(folder: Path, sizes: Sequence[int], *, first: int = 0) -> list[str]:
    """Shards of the given sizes; samples are numbered in order."""
    paths = []
    for shard, size in enumerate(sizes):
        members = [m for n in range(first, first + size) for m in pair(n)]
        paths.append(str(write_tar(folder / f"{shard:05d}.tar", members)))
        first += size
    return paths


def colour(image: Image.Image) -> torch.Tensor:
    """``[3, 4, 4]``: the colour of the first pixel."""
    pixel = torch.tensor(image.getpixel((0, 0)), dtype=torch.float32)
    return pixel.view(3, 1, 1).expand(3, 4, 4).contiguous()


def noisy_colour(image: Image.Image) -> torch.Tensor:
    """An augmentation that draws from the generators that transforms draw from."""
    return colour(image) + torch.rand(3, 1, 1) + float(np.random.rand())


def numbers(captions: list[str]) -> torch.Tensor:
    """``[b, 2]``: the captions, which are numbers."""
    return torch.tensor([[int(c) if c.isdigit() else -1, len(c)] for c in captions])


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(c)] for c in captions])


def picture_numbers(batch: Batch) -> list[int]:
    pixels = batch.image[:, :, 0, 0].long()
    return (pixels[:, 0] + 256 * pixels[:, 1]).tolist()


def make_loader(
    sources: Sequence[str],
    *,
    index: ShardIndex | None = None,
    rank: int = 0,
    world_size: int = 1,
    batch: int = 4,
    seed: int = 3,
    image_transform: Any = colour,
    tokenize: Any = numbers,
    image_size: int | None = None,
    **config: Any,
) -> TrainLoader:
    config = {"num_workers": 0, "shuffle_buffer": 8, "retry_seconds": 0.01, **config}
    return TrainLoader(
        DataConfig(shards=tuple(sources), **config),
        index or build_index(sources, cache=None, max_bad_shards=1.0),
        world=World(rank, world_size),
        local_batch_size=batch,
        image_transform=image_transform,
        tokenize=tokenize,
        seed=seed,
        image_size=image_size,
    )


def take(loader: TrainLoader, num_batches: int) -> list[list[int]]:
    """The ids of the next batches."""
    iterator = iter(loader)
    ids = [next(iterator).index.tolist() for _ in range(num_batches)]
    loader.close()
    return ids


def flat(batches: Iterable[Sequence[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def total_summary(loaders: Iterable[TrainLoader]) -> dict[str, float]:
    total: dict[str, float] = {}
    for loader in loaders:
        for name, value in loader.epoch_summary().items():
            total[name] = total.get(name, 0.0) + value
    return {name: value for name, value in total.items() if value}
