"""From the members of one sample to an image and a caption, or to the reason to skip it."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from PIL import ExifTags, Image

from disco_ds.data.tar import IMAGE_SUFFIXES

# Reported by ourselves, as a reason to skip.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


_TURN = Image.Transpose
_TURNS: Mapping[object, Image.Transpose] = {
    2: _TURN.FLIP_LEFT_RIGHT,
    3: _TURN.ROTATE_180,
    4: _TURN.FLIP_TOP_BOTTOM,
    5: _TURN.TRANSPOSE,
    6: _TURN.ROTATE_270,
    7: _TURN.TRANSVERSE,
    8: _TURN.ROTATE_90,
}


class SkipSampleError(Exception):
    """A sample cannot be used; ``reason`` is the word it is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


def random_number(*key: int) -> int:
    """64 random bits that depend on nothing but the key: the same on any rank and worker."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def find_image(members: Mapping[str, bytes]) -> bytes:
    """The bytes of the image among the members.

    Raises:
        SkipSampleError: ``missing_image`` or ``empty_image`` (zero bytes).
    """
    for suffix, content in members.items():
        if suffix in IMAGE_SUFFIXES:
            if not content:
                raise SkipSampleError("bad_image", "zero bytes")
            return content
    raise SkipSampleError("missing_image")


def decode_image(
    content: bytes, *, max_pixels: int, smallest_side: int | None = None, upright: bool = True
) -> Image.Image:
    """Decode an image of any format and mode to RGB.

    Args:
        content: the encoded image.
        max_pixels: more than this, by the header, is refused without decoding.
        smallest_side: JPEGs may be decoded at 1/2, 1/4 or 1/8 of their size (by the decoder,
            which is faster) as long as the shorter side keeps this many pixels.
        upright: turn it as its EXIF orientation says.

    Raises:
        SkipSampleError: ``huge_image`` or ``bad_image``.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(content))
        if image.width * image.height > max_pixels:
            raise SkipSampleError("huge_image", f"{image.width} x {image.height} pixels")
        if smallest_side is not None and image.format == "JPEG":
            image.draft("RGB", (smallest_side, smallest_side))
        image.load()
        if upright:
            image = _upright(image)
        return image if image.mode == "RGB" else _to_rgb(image)
    except SkipSampleError:
        raise
    except Image.DecompressionBombError as error:
        raise SkipSampleError("huge_image", str(error)) from error
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        raise SkipSampleError("bad_image", f"{type(error).__name__}: {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF says; where the EXIF cannot be read, as it is."""
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # its tags come from anybody; the pixels are fine
        return image
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow would clip 16 bits to 8 instead of scaling them.
        image = image.convert("I").point(lambda value: value / 257).convert("L")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def choose_caption(
    members: Mapping[str, bytes],
    fields: Sequence[str],
    *,
    choice: int | None = None,
    keep_empty: bool = False,
) -> str:
    """The caption of a sample.

    Args:
        members: bytes by suffix.
        fields: "txt" or "json.FIELD", in order of priority; a field may hold a list of texts.
        choice: None takes the first caption that is not empty; a number picks among all.
        keep_empty: return "" rather than skip when there is nothing else.

    Raises:
        SkipSampleError: ``missing_caption``, ``empty_caption`` or ``bad_caption``.
    """
    texts = (text.strip() for text in _captions(members, fields))
    filled = (text for text in texts if text)
    if choice is None:
        first = next(filled, None)
        if first is not None:
            return first
    elif candidates := list(filled):
        return candidates[choice % len(candidates)]
    if not any(_is_there(members, *name.split(".", 1)) for name in fields):
        raise SkipSampleError("missing_caption")
    if not keep_empty:
        raise SkipSampleError("empty_caption")
    return ""


def _is_there(members: Mapping[str, bytes], suffix: str, field: str | None = None) -> bool:
    return suffix in members and (field is None or field in parse_json(members[suffix]))


def _captions(members: Mapping[str, bytes], fields: Sequence[str]) -> Iterator[str]:
    info: Any = None
    for name in fields:
        suffix, _, field = name.partition(".")
        if suffix not in members:
            continue
        if suffix == "txt":
            yield _text(members["txt"])
            continue
        if info is None:
            info = parse_json(members["json"])
        value = info.get(field)
        yield from (
            v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)
        )


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SkipSampleError("bad_caption", "not UTF-8") from error


def parse_json(content: bytes) -> dict[str, Any]:
    """The json member of a sample.

    Raises:
        SkipSampleError: ``bad_caption``: it is not an object in JSON.
    """
    try:
        info = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SkipSampleError("bad_caption", f"odd json: {error}") from error
    if not isinstance(info, dict):
        raise SkipSampleError("bad_caption", "odd json: not an object")
    return info
