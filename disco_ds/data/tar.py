"""From the bytes of one shard to numbered samples, and to one clear reason when it is damaged.

A sample is a run of members with one key (webdataset's rule for keys). Its *position* counts the
runs of the shard from 0; a member name that repeats starts a new run, so two samples are never
joined. Positions depend on member names alone: a bad sample has one, too.

``tarfile`` ends quietly at a damaged header; here the reason is kept and raised.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from webdataset.tariterators import base_plus_ext

IMAGE_SUFFIXES = frozenset(
    ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif", "jp2")
)
TEXT_SUFFIXES = frozenset(("txt", "json"))
MAX_MEMBER_BYTES = 2**31
STREAM_BLOCK_BYTES = 2**18

# What a damaged archive can raise while its headers and data are read.
_DAMAGE = (
    tarfile.TarError,
    EOFError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
    OverflowError,
    RecursionError,
)


_HEADER_ERROR = tarfile.HeaderError  # `tarfile` is shadowed where it is needed


class ShardError(Exception):
    """A shard cannot be read (further); ``reason`` is the word it is counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _JoinedError(ShardError):
    """The archive is whole, and something follows it."""


class _CutShortError(ShardError):
    """The archive ends before the data of its last member does."""


@dataclass
class Group:
    """The members of one sample: bytes of the wanted ones, names of all."""

    position: int
    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    suffixes: list[str] = field(default_factory=list)
    duplicate: bool = False
    """The key belongs to an earlier, complete sample of the shard."""

    @property
    def complete(self) -> bool:
        """There is an image and a member that can hold a caption."""
        return not IMAGE_SUFFIXES.isdisjoint(self.suffixes) and not TEXT_SUFFIXES.isdisjoint(
            self.suffixes
        )


class _Header(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _Header:
        assert isinstance(tarfile, _Archive)
        try:
            return super().fromtarfile(tarfile)
        except _HEADER_ERROR as error:
            tarfile.last_header = type(error).__name__
            raise


class _Archive(tarfile.TarFile):
    tarinfo = _Header
    last_header = ""

    def check_end(self) -> None:
        """Raise unless the archive ended with its marker, a block of zeros, and nothing follows."""
        if self.last_header == "EOFHeaderError":
            if self._has_more():
                raise _JoinedError(
                    "damaged_shard",
                    "data after the end-of-archive marker, which nobody reads (joined archives? "
                    "unpack with tar -i and pack anew)",
                )
            return
        if self.last_header in ("EmptyHeaderError", "TruncatedHeaderError"):
            raise ShardError("truncated_shard", "cut off: the end-of-archive marker is missing")
        raise ShardError("damaged_shard", "a member header is damaged")

    def _has_more(self) -> bool:
        """Anything but zeros from here, behind the first block of zeros, to the end of the file."""
        stream: Any = self.fileobj
        while block := stream.read(STREAM_BLOCK_BYTES):
            if block.strip(b"\0"):
                return True
        return False


def read_groups(
    stream: IO[bytes],
    *,
    num_bytes: int | None,
    wanted: Callable[[int, str], bool] = lambda position, suffix: True,
) -> Iterator[Group]:
    """Yield the samples of a shard in order.

    Args:
        stream: the shard. With ``num_bytes`` it is seekable, and unwanted data is skipped
            unread; without, it is read front to back.
        num_bytes: size of a seekable shard.
        wanted: whether the data of (position, suffix) is to be read.

    Raises:
        ShardError: after the last whole sample in front of the damage. From a stream that
            cannot seek, the sample before the damage is held back: it may miss members.
    """
    grouper = _Grouper()
    try:
        for name, read in _read_members(stream, num_bytes):
            key, suffix = base_plus_ext(name)
            if key is None:
                continue
            suffix = suffix.lower()
            finished = grouper.enter(key, suffix)
            if finished is not None:
                yield finished
            if wanted(grouper.current.position, suffix):
                grouper.current.members[suffix] = read()
            grouper.current.suffixes.append(suffix)
    except ShardError as error:
        if num_bytes is not None or isinstance(error, _JoinedError):
            yield from grouper.last(cut_short=isinstance(error, _CutShortError))
        raise
    yield from grouper.last()


class _Grouper:
    """Decides which members belong together, by their names alone."""

    def __init__(self) -> None:
        self.current = Group(-1, "")
        self._completed: set[str] = set()

    def enter(self, key: str, suffix: str) -> Group | None:
        """Make ``current`` the group of a member; return the one that this ends."""
        group = self.current
        if group.key == key and suffix not in group.suffixes:
            return None
        if group.complete:
            self._completed.add(group.key)
        self.current = Group(group.position + 1, key, duplicate=key in self._completed)
        return group if group.suffixes else None

    def last(self, *, cut_short: bool = False) -> Iterator[Group]:
        """The group that was not ended by another, if it has a whole member."""
        names = self.current.suffixes
        if cut_short and names and names[-1] not in self.current.members:
            names.pop()  # its data was to be passed over, and is not all there
        if names:
            yield self.current


def _read_members(
    stream: IO[bytes], num_bytes: int | None
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield (name, function that reads the data) of each regular file."""
    with _open_archive(stream, num_bytes) as archive:
        while True:
            try:
                header = archive.next()
            except _DAMAGE as error:
                raise _CutShortError("truncated_shard", f"cut off or damaged: {error}") from error
            if header is None:
                archive.check_end()
                return
            archive.members = []  # type: ignore[attr-defined]  # or every header of the shard stays in memory
            if header.isreg() and not _is_metadata(header.name):
                yield header.name, partial(_read_data, archive, header, stream, num_bytes)


def _open_archive(stream: IO[bytes], num_bytes: int | None) -> _Archive:
    if num_bytes == 0:
        raise ShardError("empty_shard", "zero bytes")
    try:
        if num_bytes is None:
            return _Archive.open(fileobj=stream, mode="r|*", bufsize=STREAM_BLOCK_BYTES)
        return _Archive.open(fileobj=stream, mode="r:*")
    except _DAMAGE as error:
        raise ShardError("not_a_tar", "not a tar archive") from error


def _read_data(
    archive: _Archive, header: tarfile.TarInfo, stream: IO[bytes], num_bytes: int | None
) -> bytes:
    # A flipped bit in a size must not make anyone allocate an exabyte.
    limit = num_bytes if archive.fileobj is stream and num_bytes is not None else MAX_MEMBER_BYTES
    if header.size > limit:
        raise ShardError("truncated_shard", f"cut off inside {header.name}")
    try:
        data = archive.extractfile(header)
        content = b"" if data is None else data.read()
    except _DAMAGE as error:
        raise ShardError("truncated_shard", f"cut off inside {header.name}") from error
    if len(content) != header.size:
        raise ShardError("truncated_shard", f"cut off inside {header.name}")
    return content


def _is_metadata(name: str) -> bool:
    first = name.split("/", 1)[0]
    return first.startswith("__") and first.endswith("__")
