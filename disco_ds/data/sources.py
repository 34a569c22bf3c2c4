"""From what a user writes to a list of shards: braces, globs, folders, lists, addresses.

======================================  =========================================================
``/data/{00000..00099}.tar``            brace range; a gap is an error, or skipped and counted
``/data/*.tar``                         glob; local or, through fsspec, remote
``/data``                               folder as img2dataset leaves it: its ``.tar`` files only
``shards.txt``                          list: one source a line
``pipe:aws s3 cp s3://b/{0..9}.tar -``  output of a command
``s3://bucket/x.tar``, ``https://...``  address, through fsspec
======================================  =========================================================
"""

from __future__ import annotations

import difflib
import functools
import glob
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from braceexpand import braceexpand

from disco_ds.data.remote import PIPE, fsspec_filesystem, is_local, local_path

logger = logging.getLogger(__name__)

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
# What lies beside shards, where a shell expanded a pattern.
NO_SHARD_SUFFIXES = (".parquet", ".json", ".csv", ".tsv", ".npy", ".jpg", ".png")


@dataclass(frozen=True)
class Location:
    """Where a shard is, and which of the user's sources named it."""

    url: str
    source: int

    @property
    def name(self) -> str:
        """The file name: what stays when a folder moves."""
        return shard_name(self.url)


def resolve(
    sources: Sequence[str],
    *,
    missing: Literal["error", "skip"] = "error",
    require_stats: bool = False,
) -> list[Location]:
    """All shards that the sources name, each once, in the order named.

    Args:
        sources: see the table at the top of the module.
        missing: what to do about a brace range with gaps.
        require_stats: leave out shards that img2dataset has not written a stats file for (it
            does when a shard is complete). Without it they are listed in the log.

    Raises:
        ValueError: nothing was given; no such shard or pattern (with the nearest that exists).
    """
    if not sources:
        raise ValueError("no shards given: name files, a folder, a pattern or a list")
    for remembered in (read_json, _folders_with_stats):
        remembered.cache_clear()
    found: dict[str, Location] = {}
    for number, source in enumerate(sources):
        before = len(found)
        urls = list(_expand(source, missing))
        if not urls:
            raise ValueError(f"{source}: lists no shard")
        for url in urls:
            found.setdefault(_identity(url), Location(url, number))
        if len(found) == before:
            raise ValueError(f"{source}: all its shards are named by an earlier source")
    locations = list(found.values())
    unfinished = [location for location in locations if _lacks_stats(location.url)]
    if unfinished:
        logger.warning(
            "%s %d shards without a stats file (unfinished download?): %s",
            "left out" if require_stats else "using",
            len(unfinished),
            ", ".join(location.name for location in unfinished[:20]),
        )
    if require_stats:
        locations = [location for location in locations if location not in set(unfinished)]
    if not locations:
        raise ValueError(f"{' '.join(sources)}: no shard is complete (none has a stats file)")
    return locations


def _identity(url: str) -> str:
    """What two spellings of one local file, links included, have in common."""
    return os.path.realpath(local_path(url)) if is_local(url) else url


def stated_samples(url: str) -> tuple[int | None, str]:
    """The number of samples that a file beside a local shard states, and the file's name."""
    if not is_local(url):
        return None, ""
    path = local_path(url)
    stats = stats_path(path)
    if stats.is_file():
        count = read_json(str(stats)).get("successes")
        return (count if isinstance(count, int) else None), stats.name
    sizes = path.with_name("sizes.json")
    count = read_json(str(sizes)).get(path.name) if sizes.is_file() else None
    return (count if isinstance(count, int) else None), sizes.name


def trusted_remote(url: str, edge_bytes: int) -> tuple[int, int, bytes, bytes] | None:
    """A remote shard without reading it: samples by its ``_stats.json``, size, first, last bytes.

    None for local files and commands, and where img2dataset's file is missing.
    """
    if is_local(url) or url.startswith(PIPE):
        return None
    try:
        filesystem, path = fsspec_filesystem(url)
        folder, _, name = path.rpartition("/")
        stats = json.loads(filesystem.cat_file(f"{folder}/{name.split('.', 1)[0]}_stats.json"))
        num_samples, num_bytes = int(stats["successes"]), int(filesystem.size(path))
        head = filesystem.cat_file(path, 0, min(edge_bytes, num_bytes))
        tail = filesystem.cat_file(path, max(0, num_bytes - edge_bytes), num_bytes)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return num_samples, num_bytes, head, tail


def has_sizes_without(url: str) -> bool:
    """There is a sizes.json beside the shard, and the shard is not in it."""
    path = local_path(url)
    sizes = path.with_name("sizes.json")
    return is_local(url) and sizes.is_file() and path.name not in read_json(str(sizes))


@functools.lru_cache(maxsize=4096)
def read_json(path: str) -> dict[str, Any]:
    """A small JSON object; empty when it cannot be read."""
    try:
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def shard_name(url: str) -> str:
    """The file name in a path, an address or a command (its last word that names a tar)."""
    if url.startswith(PIPE):
        names = re.findall(r"[^/\s'\"|;&]+\.(?:tar(?:\.gz)?|tgz)\b", url)
        return names[-1] if names else url
    return url.split("?", 1)[0].rstrip("/").rsplit("/", 1)[-1]


def stats_path(path: Path) -> Path:
    """Where img2dataset writes the counts of a shard."""
    return path.with_name(f"{path.name.split('.', 1)[0]}_stats.json")


def _lacks_stats(url: str) -> bool:
    if not is_local(url):
        return False
    path = local_path(url)
    return str(path.parent) in _folders_with_stats(str(path.parent)) and not (
        stats_path(path).is_file()
    )


@functools.lru_cache(maxsize=1024)
def _folders_with_stats(folder: str) -> frozenset[str]:
    return frozenset([folder] if next(Path(folder).glob("*_stats.json"), None) else [])


def _expand(
    source: str, missing: Literal["error", "skip"], lists: tuple[str, ...] = ()
) -> Iterator[str]:
    """Shards of one source, in order; ``lists`` are those that led to it."""
    if not source.strip():
        raise ValueError("an empty shard name")
    source = os.path.expanduser(source)  # noqa: PTH111  (braces and stars are not a path's)
    if is_local(source) and local_path(source).is_file():
        _refuse_what_lies_beside(source)
        if source.endswith(".txt"):
            yield from _expand_list(source, missing, lists)
        else:  # braces and stars are part of its name
            yield source
        return
    try:
        urls = list(braceexpand(source))
    except ValueError as error:
        raise ValueError(f"{source}: unbalanced braces") from error
    gaps = 0
    for url in urls:
        matches = _matches(url)
        if not matches and (missing == "error" or len(urls) == 1):
            raise ValueError(_not_found(source, url))
        gaps += not matches
        yield from matches
    if gaps == len(urls):
        raise ValueError(_not_found(source, urls[0]))
    if gaps:
        logger.warning("%s: %d of %d shards do not exist: skipped", source, gaps, len(urls))


def _refuse_what_lies_beside(source: str) -> None:
    if source.endswith(NO_SHARD_SUFFIXES):
        raise ValueError(
            f"{source}: not a shard; name its folder, or put a pattern such as "
            f"'{local_path(source).parent / '*.tar'}' in quotes"
        )


def _expand_list(
    source: str, missing: Literal["error", "skip"], lists: tuple[str, ...]
) -> Iterator[str]:
    path = _identity(source)
    if path in lists:
        raise ValueError(f"{source}: this list leads back to itself")
    for line in _lines(local_path(source)):
        yield from _expand(line, missing, (*lists, path))


def _lines(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    lines = (line.strip() for line in text.splitlines())
    return (line for line in lines if line and not line.startswith("#"))


def _matches(url: str) -> list[str]:
    if url.startswith(PIPE):
        return [url]
    if not is_local(url):
        if not glob.has_magic(url.split("?", 1)[0]) or url.startswith(("http://", "https://")):
            return [url]
        filesystem, pattern = fsspec_filesystem(url)
        names = sorted(name for name in filesystem.glob(pattern) if _is_shard(name))
        return [filesystem.unstrip_protocol(name) for name in names]
    path = local_path(url)
    if path.is_dir():
        return sorted(str(p) for p in path.iterdir() if _is_shard(str(p)))
    if path.exists():
        return [url]
    return sorted(
        p
        for p in glob.glob(str(path), recursive=True)  # noqa: PTH207  (keeps ** and absolute paths)
        if _is_shard(p)
    )


def _is_shard(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name.endswith(SHARD_SUFFIXES) and not name.startswith((".", "_"))


def _not_found(source: str, url: str) -> str:
    what = source if url == source else f"{source}: {url}"
    path = local_path(url)
    if path.is_dir():
        below = next((p for p in path.glob("*/*") if _is_shard(p.name)), None)
        hint = f", but its folders do: '{path / '**' / '*.tar'}'" if below else ""
        return f"{what}: the folder holds no .tar file{hint}"
    if "::" in source:
        return f"{what}: no such shard; several sources are separated by spaces, not by ::"
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if folder != path.parent:
        return f"{what}: no such shard (nearest existing folder: {folder})"
    names = [p.name for p in folder.iterdir() if _is_shard(p.name)]
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.0)
    if not near:
        return f"{what}: no such shard ({folder} holds no .tar file)"
    return f"{what}: no such shard (nearest existing: {folder / near[0]})"
