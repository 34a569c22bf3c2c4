"""Small real shards for tests: coloured squares with exact captions, as img2dataset has them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from PIL import Image

COLOURS = ("red", "green", "blue", "yellow", "white", "black", "purple", "orange")


def write_shards(folder: Path, *, num_shards: int = 4, per_shard: int = 16) -> str:
    """Write shards and return their brace pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for row in range(per_shard):
                number = shard * per_shard + row
                for name, data in members(number, f"{shard:05d}{row:04d}").items():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    return str(folder / f"{{00000..{num_shards - 1:05d}}}.tar")


def members(number: int, key: str) -> dict[str, bytes]:
    outer, inner = COLOURS[number % 8], COLOURS[(number // 8) % 8]
    image = Image.new("RGB", (72, 72), outer)
    image.paste(inner, (20 + number % 5, 20, 50, 50 + number % 7))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    caption = f"{inner} square on {outer} {number}"
    info = json.dumps({"key": key, "caption": caption})
    return {
        f"{key}.png": buffer.getvalue(),
        f"{key}.txt": caption.encode(),
        f"{key}.json": info.encode(),
    }
