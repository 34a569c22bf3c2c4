"""Evaluation data: every row exactly once over the ranks, each rank its share."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from PIL.Image import Image

from disco_ds.data.remote import is_local, local_path, open_shard
from disco_ds.data.samples import SkipSampleError, decode_image, find_image, parse_json
from disco_ds.data.sources import resolve
from disco_ds.data.tar import Group, ShardError, read_groups
from disco_ds.distributed import World

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_IMAGE_PIXELS = 178_956_970
READ_TIMEOUT_SECONDS = 60.0


def read_samples(
    shards: Sequence[str],
    *,
    world: World,
    image_transform: Callable[[Image], T],
    only: Container[int] | None = None,
) -> Iterator[tuple[int, T, list[str], int | None]]:
    """Yield (row, transformed image, captions, class) of the rows r with ``r % W == rank``.

    Rows count the samples of all shards in the order given; every rank reads all headers, and
    the data of its own rows. No collectives; ranks may differ by one row, or more where rows
    cannot be decoded: those are left out, with one warning in all.

    Args:
        shards: sources as for training; a folder of CLIP_benchmark (with ``test/nshards.txt``
            or ``nshards.txt``) stands for its ``0.tar`` to ``n-1.tar``.
        world: place of this rank.
        image_transform: of an RGB image, as stored: open_clip and CLIP_benchmark do not turn
            photographs upright either, and their numbers are to be met.
        only: leave all other rows out, too.

    Captions are the lines of ``.txt``, else ``caption`` in ``.json``; class is the number in
    ``.cls``, or None.

    Raises:
        ValueError: no such shard, or a shard is damaged: a metric over less would be wrong.
    """

    def is_own(row: int) -> bool:
        return row % world.world_size == world.rank and (only is None or row in only)

    row_offset, num_bad = 0, 0
    for url in evaluation_shards(shards):
        group = None
        for group in _read_shard(url, row_offset, is_own):
            row = row_offset + group.position
            if not is_own(row):
                continue
            try:
                yield (row, *_decode(group, image_transform))
            except SkipSampleError as skip:
                num_bad += 1
                if num_bad == 1:
                    logger.warning("%s: %s left out: %s", url, group.key, skip)
        row_offset += 0 if group is None else group.position + 1
    if num_bad:
        logger.warning("%d rows left out of the evaluation", num_bad)


def evaluation_shards(sources: Sequence[str]) -> list[str]:
    """The shards that sources name, in order; understands the folders of CLIP_benchmark.

    Raises:
        ValueError: there is no such shard.
    """
    expanded = itertools.chain.from_iterable(_benchmark_shards(source) for source in sources)
    return [location.url for location in resolve(list(expanded))]


def _benchmark_shards(source: str) -> list[str]:
    if is_local(source):
        for folder in (local_path(source), local_path(source) / "test"):
            count = folder / "nshards.txt"
            if count.is_file():
                return [str(folder / f"{n}.tar") for n in range(_read_count(count))]
    return [source]


def _read_count(path: Path) -> int:
    try:
        return int(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not a number of shards") from error


def _read_shard(url: str, row_offset: int, is_own: Callable[[int], bool]) -> Iterator[Group]:
    try:
        stream, num_bytes = open_shard(url, timeout=READ_TIMEOUT_SECONDS)
        with closing(stream):
            yield from read_groups(
                stream,
                num_bytes=num_bytes,
                wanted=lambda position, suffix: is_own(row_offset + position),
            )
    except (ShardError, OSError) as error:
        raise ValueError(f"{url}: {error}; evaluation needs whole shards") from error


def _captions(group: Group) -> bytes:
    """``.txt``; without one, where img2dataset has its caption too."""
    if "txt" in group.members or "json" not in group.members:
        return group.members.get("txt", b"")
    try:
        caption = parse_json(group.members["json"]).get("caption")
    except SkipSampleError:
        return b""
    return " ".join(caption.split()).encode() if isinstance(caption, str) else b""


def _decode(group: Group, image_transform: Callable[[Image], T]) -> tuple[T, list[str], int | None]:
    image = decode_image(find_image(group.members), max_pixels=MAX_IMAGE_PIXELS, upright=False)
    try:
        text = _captions(group).decode()
        label = group.members.get("cls")
        number = None if label is None else int(label)
    except ValueError as error:
        raise SkipSampleError("bad_label", f"odd txt or cls member: {error}") from error
    captions = [line.strip() for line in text.splitlines() if line.strip()]
    return image_transform(image), captions, number
