"""Opening a shard: a local file, a ``pipe:`` command, or anything fsspec knows.

Streams are read by a thread of their own, so that a time limit holds whatever the source does,
and the next bytes arrive while the last ones are decoded. Closing a stream early is silent: the
command is ended and its exit status is nobody's concern.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, cast

PIPE = "pipe:"
CHUNK_BYTES = 2**20
CHUNKS_AHEAD = 4
LOCAL_BUFFER_BYTES = 2**18


class Source(Protocol):
    """What a stream is read from."""

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; none at the end; ``OSError`` when it failed."""

    def close(self) -> None:
        """Stop now, whatever is under way."""


def is_local(url: str) -> bool:
    """True for paths and ``file:`` addresses, which can be sought in."""
    return not url.startswith(PIPE) and ("://" not in url or url.startswith("file://"))


def local_path(url: str) -> Path:
    """The path of a local shard."""
    return Path(url.removeprefix("file://"))


def open_shard(url: str, *, timeout: float) -> tuple[IO[bytes], int | None]:
    """Open a shard for reading: the stream, and its size in bytes if it is seekable.

    ``timeout``: seconds without a byte after which a remote read fails.

    Raises:
        OSError: it cannot be opened; later, by ``read``, that it failed or took too long.
        ValueError: the optional package for this kind of address is not installed.
    """
    if is_local(url):
        # Closed by the caller, who gets it.
        file = local_path(url).open("rb", buffering=LOCAL_BUFFER_BYTES)
        return file, os.fstat(file.fileno()).st_size
    source: Source = Command(url.removeprefix(PIPE)) if url.startswith(PIPE) else Remote(url)
    return cast("IO[bytes]", TimedStream(source, timeout)), None


def fsspec_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of an address and the path in it.

    Raises:
        ValueError: a package is missing; names the extra to install.
    """
    try:
        filesystem, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        extra = url.startswith(("s3://", "http://", "https://"))
        remedy = "pip install 'disco_ds[remote]'" if extra else str(error)
        raise ValueError(
            f"{url}: a package for such addresses is missing: {remedy}; or use a pipe: command"
        ) from error
    return filesystem, path


class Remote:
    """A file of any fsspec file system, opened by the first read so that a time limit holds."""

    def __init__(self, url: str) -> None:
        self._filesystem, self._path = fsspec_filesystem(url)
        self._file: Any = None

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; none at the end."""
        if self._file is None:
            self._file = self._filesystem.open(self._path, "rb")
        return cast("bytes", self._file.read(size))

    def close(self) -> None:
        """Close the file, though a read may be under way."""
        if self._file is not None:
            with contextlib.suppress(Exception):  # each file system has errors of its own
                self._file.close()


class Command:
    """The output of a shell command; any failing part of a pipeline fails it."""

    def __init__(self, command: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        bash = shutil.which("bash")
        shell = [bash, "-o", "pipefail", "-c"] if bash else ["/bin/sh", "-c"]
        # Its own session, so that all of a pipeline can be ended together.
        self._process = subprocess.Popen(
            [*shell, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes; at the end, ``OSError`` if the command did not exit with 0."""
        assert self._process.stdout is not None
        chunk = cast("io.BufferedReader", self._process.stdout).read1(size)
        if not chunk and (status := self._process.wait()) != 0:
            raise OSError(f"the command ended with status {status}{self._last_words()}")
        return chunk

    def close(self) -> None:
        """End the command and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


class TimedStream:
    """A front-to-back reader over a source that may block, fail or hang."""

    def __init__(self, source: Source, timeout: float) -> None:
        self._source = source
        self._timeout = timeout
        self._chunks: queue.Queue[bytes | Exception] = queue.Queue(CHUNKS_AHEAD)
        self._rest = memoryview(b"")
        self._ended = False
        self._closed = threading.Event()
        threading.Thread(target=self._fill, daemon=True, name="shard-reader").start()

    def read(self, size: int = -1) -> bytes:
        """What has arrived, up to ``size`` bytes; none at the end. Negative: all there will be.

        Never waits for more than the first byte, so what came before a failure is not lost.

        Raises:
            OSError: the source failed, or gave nothing for ``timeout`` seconds.
        """
        if size < 0:
            return b"".join(iter(partial(self.read, CHUNK_BYTES), b""))
        if not self._rest and not self._next_chunk():
            return b""
        part = bytes(self._rest[:size])
        self._rest = self._rest[len(part) :]
        return part

    def close(self) -> None:
        """Stop the source and its thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._source.close()
        with contextlib.suppress(queue.Empty):
            while True:  # make room for a thread that waits to put
                self._chunks.get_nowait()

    def _next_chunk(self) -> bool:
        if self._ended:
            return False
        try:
            chunk = self._chunks.get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(f"no data for {self._timeout:g} s") from None
        if isinstance(chunk, Exception):
            self._ended = True
            raise chunk
        self._ended = not chunk
        self._rest = memoryview(chunk)
        return not self._ended

    def _fill(self) -> None:
        while not self._closed.is_set():
            item: bytes | Exception
            try:
                item = self._source.read(CHUNK_BYTES)
            except OSError as error:
                item = error
            except Exception as error:  # a closed file, or a file system's own errors
                item = OSError(f"{type(error).__name__}: {error}")
            self._put(item)
            if not item or isinstance(item, Exception):
                return

    def _put(self, item: bytes | Exception) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._chunks.put(item, timeout=0.1)
                return
