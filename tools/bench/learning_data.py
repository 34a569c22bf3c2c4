"""Many-artist emoji: one vocabulary of about 1,900 named emoji, drawn by eight artists.

Fetched and drawn once, under ``data/bench/emoji_artists`` (nothing of it is committed)::

    packages/          npm tarballs, each with its licence inside
    pictures.npy       uint8 [m, 128, 128, 3], on white
    pictures.json      names of the concepts; artist and concept of every picture
    LICENCES.md        who drew what, under which licence

A *concept* is an emoji without skin tones. About 10 % of them are never trained, by a hash, so that
the split never moves; nor are the pictures of the artists for choosing and for reporting.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_fetch import Package, fetch
from torch import Tensor

SIZE = 128  # pixels
FORMAT = 1
HELD_OUT_PERCENT = 10
SKIN_TONES = frozenset(chr(code) for code in range(0x1F3FB, 0x1F400))
NAMES = (
    Package(
        "cldr-annotations-full",
        "48.2.0",
        "DV7A+rEcgUSNTRsVGNGqBZRmAkGfwhGHO5Q1dRwzBoBnVrHWp804JP7/QJdEc66iHmx3+zLWVIMCFLm0lW7PUQ==",
        "Unicode-3.0",
    ),
    Package(
        "cldr-annotations-derived-full",
        "48.2.0",
        "log62km+AOzI7n/NEuNNFV0mg9DWnt67EYCh1RwxZq9dyRuyteB586LT83Ke8TchEfnwI9cIk2P31zO4nTvZmw==",
        "Unicode-3.0",
    ),
)
ARTISTS = {
    "noto": Package(
        "@iconify-json/noto",
        "1.2.9",
        "DQiuXENbun41ch+XPSV55H9FaWKpHTyz46YIKtSaKYD4fIDDzL1tR6H4np/T38jfrTAeI3rcKF0mqHYeZVAuaw==",
        "Apache-2.0",
    ),
    "noto-v1": Package(
        "@iconify-json/noto-v1",
        "1.2.5",
        "/DsVMius69Q0fRS53z7QK1TROSuar606jiIx+laXtdsYGMXpf6LtHBx6CGfoo3UHHb/XpBsw+1L1x3eyPqMuVA==",
        "Apache-2.0",
    ),
    "twemoji": Package(
        "@iconify-json/twemoji",
        "1.2.5",
        "uKpuIEV0v6K5BW3Mjdyl+XKFVAbbcPxAgifKvEMtZoUZB5+YiY5zaMm2uNNCxyXzAWU9yNLlj41WU6/mvgALsw==",
        "CC-BY-4.0",
    ),
    "emojione": Package(
        "@iconify-json/emojione",
        "1.2.3",
        "T9+T3HIbJNLKKsmxYKlaYhvnHYkz/HNYTV7SHCXVZPfeUi4FqskY70YeN8yYAZT8cCv7w5vJxS4Q1m8zb9CMMg==",
        "CC-BY-4.0",
    ),
    "emojione-v1": Package(
        "@iconify-json/emojione-v1",
        "1.2.3",
        "UjI2VQEXVtGlPBvQuxEizro7QCgBcJDOYwKUupquvvZ8UV4xOlvm45IU82JYWegiAWLerY79gFLMZ26U6Ms+ww==",
        "CC-BY-SA-4.0",
    ),
    "fluent-flat": Package(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "RY47RgPb47fYUiyrA64sIOL0+UU02s29sXpNBbIQRBUlPlfNFTKUmZDERGuxDs/7yNGWqQYvuaSYM1M4fRXlUw==",
        "MIT",
    ),
    "fluent-3d": Package(
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "Wlq2lVStTnr8BDpIJ0pEnTKO4LuDxxqTEhTvRtD1DLRF0me7ogeRQjKoehDHXuVJ2Qaecgl5wRBv60lUAG3h7g==",
        "MIT",
    ),
    "openmoji": Package(
        "openmoji",
        "17.0.0",
        "EBnYrNGdcdw+OSXmENeNE1yBNRu6tOraTmoOyUbJkTmvT/+XETp8RZLSJFzD3lrPc5N9CzsyPnRTk0Vp4UaI9w==",
        "CC-BY-SA-4.0",
    ),
}
Draw = Callable[[], Any]  # a PIL image, RGB


@dataclass(frozen=True)
class Emoji:
    """The data set: ``m`` pictures of ``n`` concepts."""

    names: tuple[str, ...]  # [n]
    held_out: Tensor  # bool [n], concepts never trained
    artists: tuple[str, ...]  # [m]
    concepts: Tensor  # int64 [m]
    pixels: Any  # uint8 array [m, 128, 128, 3], mapped from the disk

    def drawn_by(self, *artists: str) -> Tensor:
        """Rows of the pictures of some artists, int64."""
        return torch.tensor([row for row, name in enumerate(self.artists) if name in artists])


def is_held_out(key: str) -> bool:
    """Decided by a hash of the emoji's code points."""
    return hashlib.sha256(key.encode()).digest()[0] * 100 < HELD_OUT_PERCENT * 256


def load(folder: Path) -> Emoji:
    """The data set, built first where it is missing (about a minute, 0.6 GB).

    Raises:
        CannotFetch: a package cannot be had.
    """
    index_file = folder / "pictures.json"
    if not index_file.is_file() or json.loads(index_file.read_text())["format"] != FORMAT:
        build(folder)
    index = json.loads(index_file.read_text())
    return Emoji(
        names=tuple(index["names"]),
        held_out=torch.tensor([is_held_out(key) for key in index["keys"]]),
        artists=tuple(index["artists"]),
        concepts=torch.tensor(index["concepts"]),
        pixels=np.load(folder / "pictures.npy", mmap_mode="r"),
    )


def build(folder: Path) -> None:
    """Fetch the packages and draw every emoji that has a name; the index is written last."""
    tarballs = {name: fetch(package, folder / "packages") for name, package in ARTISTS.items()}
    vocabulary: dict[str, str] = {}
    for package in NAMES:
        vocabulary |= read_names(fetch(package, folder / "packages"))
    drawings = {name: _drawings(name, path, vocabulary) for name, path in tarballs.items()}
    # Names of mere symbols ("open curly bracket") have no picture with these two.
    keys = [key for key in vocabulary if key in drawings["openmoji"] or key in drawings["twemoji"]]
    rows = [(name, key) for name in ARTISTS for key in keys if key in drawings[name]]
    print(f"drawing {len(rows)} pictures of {len(keys)} emoji to {folder} (once)", flush=True)
    pixels = np.lib.format.open_memmap(
        folder / "pictures.npy", mode="w+", dtype=np.uint8, shape=(len(rows), SIZE, SIZE, 3)
    )
    for row, (name, key) in enumerate(rows):
        pixels[row] = np.asarray(drawings[name][key]())
    pixels.flush()
    places = {key: place for place, key in enumerate(keys)}
    index = {
        "format": FORMAT,
        "keys": keys,
        "names": [vocabulary[key] for key in keys],
        "artists": [name for name, _ in rows],
        "concepts": [places[key] for _, key in rows],
    }
    (folder / "LICENCES.md").write_text(_licences())
    (folder / "pictures.json").write_text(json.dumps(index))


def read_names(tarball: Path) -> dict[str, str]:
    """English name of each character sequence, by :func:`key_of`; none with a skin tone."""
    (content,) = _members(tarball, r"/en/annotations\.json$").values()
    parsed = json.loads(content)
    entries = next(iter(parsed.values()))["annotations"]
    return {
        key_of(text): entry["tts"][0]
        for text, entry in entries.items()
        if "tts" in entry and not SKIN_TONES & set(text)
    }


def key_of(text: str) -> str:
    """Code points in hexadecimal, without the variation selector."""
    return "-".join(f"{ord(char):x}" for char in text if char != "\ufe0f")


def slug_of(name: str) -> str:
    """A name as icon sets write it: ``woman’s hat`` is ``womans-hat``."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"['.!&]", "", plain)).strip("-")


def _drawings(artist: str, tarball: Path, vocabulary: dict[str, str]) -> dict[str, Draw]:
    if artist == "openmoji":
        files = _members(tarball, r"/color/svg/[^/]+\.svg$")
        return {_stem_key(path): _svg(content.decode()) for path, content in files.items()}
    if artist == "fluent-3d":
        files = _members(tarball, r"/assets/[^/]+\.webp$")
        return {_stem_key(path): _bitmap(content) for path, content in files.items()}
    return dict(_icon_drawings(tarball, vocabulary))


def _icon_drawings(tarball: Path, vocabulary: dict[str, str]) -> Iterator[tuple[str, Draw]]:
    """Icon sets: found by code points where the set states them, by name elsewhere."""
    files = _members(tarball, r"package/(icons|chars)\.json$")
    icons = json.loads(files["package/icons.json"])
    stated = json.loads(files.get("package/chars.json", b"{}"))
    by_key = {key.replace("-fe0f", ""): icon for key, icon in stated.items()}
    for key, name in vocabulary.items():
        icon = by_key.get(key, slug_of(name))
        if (svg := icon_svg(icons, icon)) is not None:
            yield key, _svg(svg)


def icon_svg(icons: dict[str, Any], name: str) -> str | None:
    """An icon of an Iconify set as SVG; None where there is none."""
    alias = icons.get("aliases", {}).get(name, {})
    icon = icons["icons"].get(alias.get("parent", name))
    if icon is None or alias.get("rotate"):
        return None
    width, height = icon.get("width", icons["width"]), icon.get("height", icons["height"])
    body = icon["body"]
    if alias.get("hFlip"):
        body = f'<g transform="translate({width} 0) scale(-1 1)">{body}</g>'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}">{body}</svg>'
    )


def _svg(text: str) -> Draw:
    def draw() -> Any:
        import resvg_py
        from PIL import Image

        png = resvg_py.svg_to_bytes(
            svg_string=text, width=SIZE, height=SIZE, background="#ffffff", skip_system_fonts=True
        )
        image = Image.open(io.BytesIO(bytes(png))).convert("RGB")
        return image if image.size == (SIZE, SIZE) else image.resize((SIZE, SIZE))

    return draw


def _bitmap(content: bytes) -> Draw:
    def draw() -> Any:
        from PIL import Image

        image = Image.open(io.BytesIO(content)).convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        whole = Image.alpha_composite(ground, image).convert("RGB")
        return whole.resize((SIZE, SIZE), Image.Resampling.LANCZOS)

    return draw


def _members(tarball: Path, pattern: str) -> dict[str, bytes]:
    found = {}
    with tarfile.open(tarball) as tar:
        for member in tar:
            if re.search(pattern, member.name) and (file := tar.extractfile(member)) is not None:
                found[member.name] = file.read()
    return found


def _stem_key(path: str) -> str:
    """Of a file named by its code points, such as ``0031-FE0F-20E3.svg``."""
    codes = re.split("[-_]", Path(path).stem)
    return key_of("".join(chr(int(code, 16)) for code in codes))


def _licences() -> str:
    lines = ["# Emoji of eight artists, rendered on white; for benchmarks only", ""]
    lines += [
        f"- {name}: npm `{package.name}` {package.version}, {package.licence}"
        for name, package in [*ARTISTS.items(), *(("names", package) for package in NAMES)]
    ]
    return "\n".join([*lines, "", "The pictures are adaptations under the same licences.", ""])
