"""Pictures for trackers: training pairs with captions, and retrievals with their answers."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

PICTURE, TEXT_WIDTH, LINE, MARGIN = 128, 200, 16, 8
INK, RIGHT, WRONG = (27, 32, 38), (15, 123, 79), (179, 38, 30)
Line = tuple[str, tuple[int, int, int]]


def pairs_picture(
    images: Tensor, captions: Sequence[str], preprocess: Mapping[str, Any], *, limit: int
) -> Image.Image:
    """The first pairs of a batch as the model sees them.

    Args:
        images: ``[n, 3, S, S]``, normalised.
        captions: n texts.
        preprocess: the ``mean`` and ``std`` the images were normalised with.
        limit: how many to show.
    """
    chosen = images[:limit].detach().float().cpu()
    mean, std = (torch.tensor(preprocess[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    pixels = ((chosen * std + mean).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    rows = [
        ([Image.fromarray(picture)], [(caption, INK)])
        for picture, caption in zip(pixels, captions[:limit], strict=True)
    ]
    return _sheet(rows)


def retrieval_picture(examples: Sequence[Mapping[str, Any]], *, limit: int) -> Image.Image:
    """Queries with their answers, right ones in green.

    Args:
        examples: as :func:`disco_ds.evaluation.gallery.gallery` makes them, of either direction.
        limit: how many to show.
    """
    return _sheet([_retrieval_row(example) for example in examples[:limit]])


def _retrieval_row(example: Mapping[str, Any]) -> tuple[list[Image.Image], list[Line]]:
    answers = example["answers"]
    if "picture" in example:
        lines: list[Line] = [(" / ".join(example["captions"]), INK)]
        for number, answer in enumerate(answers, start=1):
            colour = RIGHT if answer["correct"] else WRONG
            lines.append((f"{number}. {answer['caption']} ({answer['score']:.3f})", colour))
        lines.append((f"right answer at rank {example['rank']}", INK))
        return [_decoded(example["picture"])], lines
    pictures = [
        _framed(_decoded(answer["picture"]), RIGHT if answer["correct"] else WRONG)
        for answer in answers
    ]
    return pictures, [(example["caption"], INK), (f"right picture at rank {example['rank']}", INK)]


def _decoded(data_url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data_url.partition(",")[2])))


def _framed(picture: Image.Image, colour: tuple[int, int, int]) -> Image.Image:
    return ImageOps.expand(picture, border=3, fill=colour)


def _sheet(rows: Sequence[tuple[Sequence[Image.Image], Sequence[Line]]]) -> Image.Image:
    """A row each: pictures on the left, lines of text on the right."""
    columns = max((len(pictures) for pictures, _ in rows), default=1)
    left = columns * (PICTURE + MARGIN) + MARGIN
    height = PICTURE + MARGIN
    sheet = Image.new("RGB", (left + TEXT_WIDTH, max(1, len(rows)) * height + MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, (pictures, lines) in enumerate(rows):
        top = MARGIN + number * height
        for column, picture in enumerate(pictures):
            fitted = ImageOps.contain(picture.convert("RGB"), (PICTURE, PICTURE))
            sheet.paste(fitted, (MARGIN + column * (PICTURE + MARGIN), top))
        wrapped = [(part, colour) for text, colour in lines for part in textwrap.wrap(text, 32)]
        for line, (text, colour) in enumerate(wrapped[: PICTURE // LINE]):
            draw.text((left, top + line * LINE), text, fill=colour, font=font)
    return sheet
