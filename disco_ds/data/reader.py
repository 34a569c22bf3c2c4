"""Reads chosen samples of shards: one item per position asked for, whatever happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from disco_ds.data.index import Shard
from disco_ds.data.partition import Segment
from disco_ds.data.remote import is_local, open_shard
from disco_ds.data.tar import IMAGE_SUFFIXES, Group, ShardError, read_groups

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 60.0


@dataclass
class RawSample:
    """The undecoded members of a sample, or the reason why there are none."""

    shard: int
    position: int
    key: str = ""
    members: dict[str, bytes] = field(default_factory=dict)
    suffixes: Sequence[str] = ()
    """Names of all members, read or not."""
    problem: str = ""


@dataclass
class _Open:
    shard: int
    stream: IO[bytes]
    groups: Iterator[Group]
    next_position: int


class ShardReader:
    """Keeps one shard open and reads segments of it, and of others, as they are asked for.

    A shard that fails is opened again, after a growing wait, and read on from the next position:
    nothing is delivered twice. When it fails for good, its remaining positions come as problems,
    and one line of log says why.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        suffixes: Collection[str],
        retries: int,
        retry_seconds: float,
        timeout: float,
    ) -> None:
        """``suffixes``: members to read besides images, e.g. ``{"txt", "json"}``."""
        self._shards = shards
        self._suffixes = IMAGE_SUFFIXES.union(suffixes)
        self._retries = retries
        self._retry_seconds = retry_seconds
        self._timeout = timeout
        self._open: _Open | None = None
        self._first_wanted = 0
        self._failed: dict[int, tuple[int, str]] = {}  # shard: first lost position, reason

    def read(self, segment: Segment) -> Iterator[RawSample]:
        """Yield one item per position of the segment, in order."""
        position = segment.start
        attempt = 0
        while position < min(segment.stop, self._first_lost(segment.shard)):
            try:
                group = self._next(segment.shard, position)
                yield _raw(segment.shard, group)
                position += 1
                attempt = 0
            except (ShardError, OSError) as error:
                attempt += 1
                if attempt > self._retries or not self._worth_retrying(segment.shard, error):
                    self._give_up(segment.shard, position if self._has_read() else 0, error)
                self.close()
                if segment.shard not in self._failed:
                    time.sleep(min(self._retry_seconds * 2 ** (attempt - 1), MAX_WAIT_SECONDS))
        for rest in range(position, segment.stop):
            yield RawSample(segment.shard, rest, problem=self._failed[segment.shard][1])

    def close(self) -> None:
        """Close the open shard; reading may go on afterwards."""
        if self._open is not None:
            opened, self._open = self._open, None
            with suppress(OSError):
                opened.stream.close()

    def _next(self, shard: int, position: int) -> Group:
        """The sample at a position, opening or skipping as needed."""
        self._first_wanted = position
        opened = self._open
        if opened is None or opened.shard != shard or opened.next_position > position:
            opened = self._reopen(shard)
        for group in opened.groups:
            opened.next_position = group.position + 1
            if group.position == position:
                if opened.next_position == self._shards[shard].num_samples:
                    self.close()
                return group
        raise ShardError("short_shard", f"fewer samples than the index says, {position} at most")

    def _reopen(self, shard: int) -> _Open:
        self.close()
        stream, num_bytes = open_shard(self._shards[shard].url, timeout=self._timeout)
        groups = read_groups(stream, num_bytes=num_bytes, wanted=self._wanted)
        self._open = _Open(shard, stream, groups, 0)
        return self._open

    def _wanted(self, position: int, suffix: str) -> bool:
        return position >= self._first_wanted and suffix in self._suffixes

    def _worth_retrying(self, shard: int, error: Exception) -> bool:
        """Damage inside a local file stays; a missing one too."""
        if isinstance(error, FileNotFoundError):
            return False
        return isinstance(error, OSError) or not is_local(self._shards[shard].url)

    def _first_lost(self, shard: int) -> int:
        return self._failed[shard][0] if shard in self._failed else self._shards[shard].num_samples

    def _has_read(self) -> bool:
        return self._open is not None and self._open.next_position > 0

    def _give_up(self, shard: int, position: int, error: Exception) -> None:
        reason = error.reason if isinstance(error, ShardError) else "unreadable_shard"
        if shard not in self._failed:
            url = self._shards[shard].url
            logger.warning("%s: %s: %s; the rest is skipped", url, reason, error)
        self._failed[shard] = position, reason


def _raw(shard: int, group: Group) -> RawSample:
    return RawSample(
        shard,
        group.position,
        group.key,
        group.members,
        group.suffixes,
        "duplicate_sample" if group.duplicate else "",
    )
