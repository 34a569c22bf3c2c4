"""The index of a data set: how many samples each shard holds, hence a stable number per sample.

``index = offsets[shard] + position in the shard``. Shards are sorted by file name, and by content
where names agree, so the numbers do not depend on the order in which shards are named, nor on
where they lie. They change when shards are added or changed; so does the fingerprint.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

import tyro
from tqdm import tqdm

from disco_ds.data.config import DataConfig
from disco_ds.data.remote import is_local, local_path, open_shard
from disco_ds.data.sources import (
    Location,
    has_sizes_without,
    resolve,
    shard_name,
    stated_samples,
    trusted_remote,
)
from disco_ds.data.tar import ShardError, read_groups
from disco_ds.output import check_writable

logger = logging.getLogger(__name__)

FORMAT = 1
EDGE_BYTES = 2**16
MIN_SHARDS_PER_WORKER = 8
DEFAULT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Shard:
    """One shard as it was when it was read."""

    url: str
    num_samples: int
    """Positions in the shard, those of bad samples included."""
    num_bytes: int
    fingerprint: str
    """Of size, first and last 64 KiB: cheap, and the same wherever the shard lies."""
    source: int = 0
    """Number of the source (as the user listed them) that named the shard."""
    modified: int = 0
    """Time of change in ns; 0 if not a local file."""
    damage: str = ""
    """Why the shard ends early, or holds nothing; empty for a sound one."""

    @property
    def name(self) -> str:
        """The file name: what stays when a folder moves."""
        return shard_name(self.url)


@dataclass(frozen=True)
class ShardIndex:
    """All shards of a data set in their canonical order."""

    shards: tuple[Shard, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples per shard."""
        return tuple(shard.num_samples for shard in self.shards)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The ``index`` of the first sample of each shard."""
        return tuple(itertools.accumulate(self.sizes, initial=0))[:-1]

    @property
    def num_samples(self) -> int:
        """Ids are 0 up to this number, exclusive."""
        return sum(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal content, wherever it lies."""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(f"{shard.fingerprint} {shard.num_samples}\n".encode())
        return digest.hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write JSON, one shard a line; whole or not at all."""
        lines = ",\n".join(json.dumps(asdict(shard)) for shard in self.shards)
        head = json.dumps({"format": FORMAT, "fingerprint": self.fingerprint})[1:-1]
        partial_path = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path.write_text(f'{{{head}, "shards": [\n{lines}\n]}}\n')
        partial_path.replace(path)

    @classmethod
    def load(cls, path: Path) -> ShardIndex:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: there is no such file, or it is something else.
        """
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, this release reads {FORMAT}")
            return cls(tuple(Shard(**shard) for shard in content["shards"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not an index of disco-ds index ({error})") from error


def build_index(
    sources: Sequence[str],
    *,
    cache: Path | None,
    num_workers: int = 0,
    progress: bool = False,
    counts: Literal["read", "trust"] = "read",
    missing: Literal["error", "skip"] = "error",
    require_stats: bool = False,
    max_bad_shards: float = 0.1,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    on_shard: Callable[[], None] = lambda: None,
) -> ShardIndex:
    """Count the samples of all shards that ``sources`` name.

    Args:
        sources: see :mod:`disco_ds.data.sources`.
        cache: an earlier index; only new or changed shards are read, and it is written anew.
            Shards that are not local files are taken as unchanged.
        num_workers: processes that read, if there is enough to do; 0: this one.
        progress: show a progress bar.
        counts: "read" counts every shard's members and warns where a ``_stats.json`` or
            ``sizes.json`` is wrong; "trust" takes their numbers and reads what lacks one.
        missing: brace ranges with gaps: "error", or "skip" with a warning.
        require_stats: leave out shards without a stats file of img2dataset.
        max_bad_shards: share of unreadable or damaged shards that is tolerated.
        timeout: seconds without a byte after which a remote read fails.
        on_shard: called after each shard that was read.

    Raises:
        ValueError: no such shard or pattern; no shard is a tar with samples; too many are bad.
    """
    check_workers(num_workers)
    if not 0 <= max_bad_shards <= 1:
        raise ValueError(f"max_bad_shards {max_bad_shards:g}: must be from 0 to 1")
    locations = resolve(sources, missing=missing, require_stats=require_stats)
    known = _known(cache)
    shards: list[Shard | None] = [_reuse(location, known) for location in locations]
    todo = [number for number, shard in enumerate(shards) if shard is None]
    if todo:
        logger.info("index: reading %d of %d shards", len(todo), len(shards))
    count = partial(count_shard, counts=counts, timeout=timeout)
    with ordered_map(min(num_workers, len(todo) // MIN_SHARDS_PER_WORKER)) as mapper:
        results = mapper(count, [locations[number] for number in todo])
        for number, shard in zip(todo, _progress(results, len(todo), progress), strict=True):
            _report(shard)
            shards[number] = shard
            on_shard()
    found = cast("list[Shard]", shards)
    _check_damage(found, max_bad_shards)
    _warn_of_copies(found)
    index = ShardIndex(tuple(sorted(found, key=lambda s: (s.name, s.fingerprint, s.url))))
    if cache is not None and (todo or len(known) != len(found)):
        index.save(cache)
    return index


def configured_index(
    config: DataConfig, *, on_shard: Callable[[], None] = lambda: None
) -> ShardIndex:
    """The index of the training data that settings name; see :func:`build_index`."""
    return build_index(
        config.shards,
        cache=config.index,
        num_workers=min(8, os.cpu_count() or 1),
        on_shard=on_shard,
        missing=config.missing_shards,
        require_stats=config.require_stats,
        max_bad_shards=config.max_bad_shards,
        timeout=config.read_timeout,
    )


def count_shard(location: Location, *, counts: Literal["read", "trust"], timeout: float) -> Shard:
    """Read one shard's members (headers alone where it can be sought in) and describe it.

    Damage is recorded in the result, not raised.
    """
    stated, stated_by = stated_samples(location.url)
    shard = Shard(location.url, 0, 0, "", location.source)
    if counts == "trust" and (known := trusted_remote(location.url, EDGE_BYTES)) is not None:
        samples, size, head, tail = known
        identity = _fingerprint(size, head, tail)
        return replace(shard, num_samples=samples, num_bytes=size, fingerprint=identity)
    try:
        stream, num_bytes = open_shard(location.url, timeout=timeout)
    except OSError as error:
        return replace(shard, damage=f"unreadable_shard: {error}")
    with closing(stream):
        if num_bytes is None:
            return _count_stream(shard, stream)
        shard = replace(
            shard,
            num_bytes=num_bytes,
            fingerprint=_edges(stream, num_bytes),
            modified=local_path(location.url).stat().st_mtime_ns,
        )
        if counts == "trust" and stated is not None:
            return replace(shard, num_samples=stated)
        num_samples, damage = _count(stream, num_bytes)
    if has_sizes_without(location.url):
        logger.warning("%s is not in sizes.json: counted by reading", location.name)
    if stated is not None and stated != num_samples:
        logger.warning(
            "%s: %s says %d samples, the shard has %d: using %d",
            *(location.url, stated_by, stated, num_samples, num_samples),
        )
    return replace(shard, num_samples=num_samples, damage=damage)


def _count(stream: IO[bytes], num_bytes: int | None) -> tuple[int, str]:
    count = 0
    try:
        for _ in read_groups(stream, num_bytes=num_bytes, wanted=lambda position, suffix: False):
            count += 1
    except ShardError as error:
        return count, f"{error.reason}: {error}"
    except OSError as error:
        return count, f"unreadable_shard: {error}"
    return count, ""


class _EdgeReader:
    """Passes a stream on, remembering its length, its first and its last bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.num_bytes = 0
        self.head = self.tail = b""

    def read(self, size: int) -> bytes:
        chunk = self._stream.read(size)
        self.num_bytes += len(chunk)
        if len(self.head) < EDGE_BYTES:
            self.head = (self.head + chunk)[:EDGE_BYTES]
        self.tail = (self.tail + chunk)[-EDGE_BYTES:]
        return chunk


def _count_stream(shard: Shard, stream: IO[bytes]) -> Shard:
    reader = _EdgeReader(stream)
    num_samples, damage = _count(cast("IO[bytes]", reader), None)
    if not damage:
        try:
            while reader.read(EDGE_BYTES):
                pass
        except OSError as error:
            damage = f"unreadable_shard: {error}"
    return replace(
        shard,
        num_samples=num_samples,
        num_bytes=reader.num_bytes,
        fingerprint=_fingerprint(reader.num_bytes, reader.head, reader.tail),
        damage=damage,
    )


def _edges(stream: IO[bytes], num_bytes: int) -> str:
    head = stream.read(EDGE_BYTES)
    stream.seek(max(0, num_bytes - EDGE_BYTES))
    tail = stream.read(EDGE_BYTES)
    stream.seek(0)
    return _fingerprint(num_bytes, head, tail)


def _fingerprint(num_bytes: int, head: bytes, tail: bytes) -> str:
    digest = hashlib.sha256(str(num_bytes).encode())
    digest.update(head)
    digest.update(tail)
    return digest.hexdigest()[:16]


def _known(cache: Path | None) -> dict[str, Shard]:
    """Shards of an earlier index by address."""
    if cache is None or not cache.exists():
        return {}
    return {shard.url: shard for shard in ShardIndex.load(cache).shards}


def _reuse(location: Location, known: dict[str, Shard]) -> Shard | None:
    """The earlier entry of a shard that has not changed since."""
    shard = known.get(location.url)
    if shard is None or shard.damage:
        return None
    if is_local(location.url):
        status = local_path(location.url).stat()
        if (status.st_size, status.st_mtime_ns) != (shard.num_bytes, shard.modified):
            return None
    return replace(shard, source=location.source)


@contextmanager
def ordered_map(num_workers: int) -> Iterator[Any]:
    """``map`` in this process or over a pool of several, results in order."""
    if num_workers <= 1:
        yield map
        return
    # Not by fork: see disco_ds.data.workers.
    pool = ProcessPoolExecutor(num_workers, mp_context=get_context("forkserver"))
    try:
        yield partial(pool.map, chunksize=4)
    finally:
        pool.shutdown(cancel_futures=True)


def _progress(results: Iterable[Shard], total: int, show: bool) -> Iterator[Shard]:
    return iter(tqdm(results, total=total, unit="shard", disable=not show, file=sys.stderr))


def _report(shard: Shard) -> None:
    if shard.damage:
        logger.warning("%s: %s (%d samples kept)", shard.url, shard.damage, shard.num_samples)


def _warn_of_copies(shards: Sequence[Shard]) -> None:
    """Links are told apart by ``resolve``; copies, and addresses of one file, by their content."""
    first: dict[tuple[str, int, int], Shard] = {}
    copies = []
    for shard in shards:
        original = first.setdefault((shard.fingerprint, shard.num_bytes, shard.num_samples), shard)
        if original is not shard and shard.num_samples:
            copies.append(f"{shard.url} = {original.url}")
    if copies:
        logger.warning(
            "%d shards look like copies of others, their samples count twice: %s",
            *(len(copies), "; ".join(copies[:5])),
        )


def check_workers(num_workers: int) -> None:
    """Refuse a negative number of processes."""
    if num_workers < 0:
        raise ValueError(f"num_workers {num_workers}: must not be negative")


def _check_damage(shards: list[Shard], max_bad_shards: float) -> None:
    bad = [shard for shard in shards if shard.damage]
    if sum(shard.num_samples for shard in shards) == 0:
        reason = f"{bad[0].url}: {bad[0].damage}" if bad else f"{shards[0].url}: holds no samples"
        raise ValueError(f"no samples in {len(shards)} shards; {reason}")
    if len(bad) > max_bad_shards * len(shards):
        listed = "; ".join(f"{shard.name}: {shard.damage}" for shard in bad[:5])
        raise ValueError(
            f"{len(bad)} of {len(shards)} shards are damaged, more than the tolerated share "
            f"{max_bad_shards:g}: {listed}. Repair them (disco-ds validate --fix) or "
            "raise the share"
        )


@dataclass(frozen=True)
class IndexCommand:
    """Count the samples of shards and write the index that training starts from."""

    shards: tyro.conf.Positional[tuple[str, ...]]
    """Shards: files, folders, brace ranges, globs, .txt lists, pipe: commands, s3:// or https://."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("index.json")
    """File to write; if it exists, only new or changed shards are read."""
    num_workers: int = min(8, os.cpu_count() or 1)
    """Processes that read shards."""
    counts: Literal["read", "trust"] = "read"
    """read: count members, report wrong _stats.json or sizes.json; trust: believe those files."""
    missing: Literal["error", "skip"] = "error"
    """What to do about gaps in a brace range."""
    require_stats: bool = False
    """Leave out shards that img2dataset wrote no _stats.json for (unfinished downloads)."""
    max_bad_shards: float = 0.1
    """Share of damaged shards that is tolerated, 0 to 1."""
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    """Seconds without a byte after which a remote read fails."""

    def run(self) -> int:
        """Write the index; print what it holds. Returns the exit status."""
        check_writable(self.output, "-o")
        index = build_index(
            self.shards,
            cache=self.output,
            num_workers=self.num_workers,
            progress=sys.stderr.isatty(),
            counts=self.counts,
            missing=self.missing,
            require_stats=self.require_stats,
            max_bad_shards=self.max_bad_shards,
            timeout=self.timeout,
        )
        damaged = sum(bool(shard.damage) for shard in index.shards)
        num_bytes = sum(shard.num_bytes for shard in index.shards)
        print(  # noqa: T201  (a command's output)
            f"{self.output}: {index.num_samples} samples in {len(index.shards)} shards, "
            f"{num_bytes / 1e6:.1f} MB, {damaged} damaged, fingerprint {index.fingerprint}"
        )
        return 0
