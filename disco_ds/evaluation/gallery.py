"""Best and worst retrievals as pictures: for the report, TensorBoard and ``disco-ds evaluate``."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from disco_ds.data.evaluation import read_samples
from disco_ds.distributed import World
from disco_ds.evaluation.ranking import row_of_caption
from disco_ds.evaluation.retrieval import Example, RetrievalResult

THUMBNAIL_PIXELS = 112


@dataclass(frozen=True)
class Pictured:
    """A row of the set as people see it."""

    picture: Image.Image
    captions: list[str]


def read_pictures(shards: Sequence[str], result: RetrievalResult) -> dict[int, Pictured]:
    """Thumbnails and captions of all rows that the examples name; on one rank.

    A second reading of the set: of its headers, and of the data of these few rows.
    """
    wanted = _rows(result)
    rows = read_samples(shards, world=World(), image_transform=thumbnail, only=wanted)
    return {row: Pictured(picture, captions) for row, picture, captions, _ in rows}


def _rows(result: RetrievalResult) -> set[int]:
    rows: set[int] = set()
    for found in (result.best, result.worst):
        for example in found["image_to_text"]:
            rows |= {example.place, *(row_of_caption(place)[0] for place in example.answers)}
        for example in found["text_to_image"]:
            rows |= {row_of_caption(example.place)[0], *example.answers}
    return rows


def thumbnail(image: Image.Image) -> Image.Image:
    """A small copy that keeps the proportions."""
    small = image.copy()
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    return small


def data_url(picture: Image.Image) -> str:
    """A picture as text, to stand inside a page."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def gallery(result: RetrievalResult, pictures: dict[int, Pictured]) -> dict[str, Any]:
    """JSON-ready: per direction the best and the worst examples, pictures as data addresses."""
    plain: dict[str, Any] = {}
    for direction, describe in (("image_to_text", _captions_for), ("text_to_image", _pictures_for)):
        plain[direction] = {
            quality: [describe(example, pictures) for example in found[direction]]
            for quality, found in (("best", result.best), ("worst", result.worst))
        }
    return plain


def _captions_for(example: Example, pictures: dict[int, Pictured]) -> dict[str, Any]:
    own = pictures[example.place]
    answers = []
    for place, score in zip(example.answers, example.scores, strict=True):
        row, number = row_of_caption(place)
        caption = pictures[row].captions[number]
        answers.append({"caption": caption, "score": score, "correct": row == example.place})
    return {
        "picture": data_url(own.picture),
        "captions": own.captions,
        "rank": example.rank + 1,
        "answers": answers,
    }


def _pictures_for(example: Example, pictures: dict[int, Pictured]) -> dict[str, Any]:
    own_row, number = row_of_caption(example.place)
    answers = []
    for row, score in zip(example.answers, example.scores, strict=True):
        found = pictures[row]
        answers.append(
            {
                "picture": data_url(found.picture),
                "caption": " \u00b7 ".join(found.captions),
                "score": score,
                "correct": row == own_row,
            }
        )
    return {
        "caption": pictures[own_row].captions[number],
        "rank": example.rank + 1,
        "answers": answers,
    }
