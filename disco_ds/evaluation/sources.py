"""Where evaluation rows come from: shards or image folders, read by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TypeVar

from PIL.Image import Image

from disco_ds.data.evaluation import MAX_IMAGE_PIXELS, read_samples
from disco_ds.data.samples import SkipSampleError, decode_image
from disco_ds.distributed import World
from disco_ds.evaluation.tasks import ZeroShotTask, list_images

T = TypeVar("T")
Row = tuple[int, T, list[str], int | None]


def read_task(
    task: ZeroShotTask, *, world: World, image_transform: Callable[[Image], T]
) -> Iterator[Row[T]]:
    """Rows of a classification set, as :func:`disco_ds.data.evaluation.read_samples` yields them.

    Raises:
        ValueError: a shard is damaged, or an image of a folder cannot be decoded.
    """
    if task.folder is None:
        return read_samples(task.shards, world=world, image_transform=image_transform)
    return read_image_folder(task.folder, world=world, image_transform=image_transform)


def read_image_folder(
    folder: Path,
    *,
    world: World,
    image_transform: Callable[[Image], T],
    only: Container[int] | None = None,
) -> Iterator[Row[T]]:
    """Rows of a folder of class folders; no captions.

    Raises:
        ValueError: naming the file that is no image: a metric over less would be another one.
    """
    for row, (path, label) in enumerate(list_images(folder)):
        if row % world.world_size != world.rank or (only is not None and row not in only):
            continue
        try:
            image = decode_image(path.read_bytes(), max_pixels=MAX_IMAGE_PIXELS, upright=False)
        except SkipSampleError as error:
            raise ValueError(f"{path}: not an image: {error}; remove or mend it") from error
        yield row, image_transform(image), [], label
