"""A file that is flushed to disk, and whose checksum is known without reading it again."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO


class HashedFile:
    """Blocks written one after another; another thread computes their SHA-256 meanwhile.

    That thread keeps references, not copies: a block must not change until :meth:`finish`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._blocks: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checksum", daemon=True)
        self._thread.start()
        self.num_bytes = 0

    def _run(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._hash.update(block)

    def write(self, block: Any, /) -> None:
        """Append a bytes-like object."""
        self._blocks.put(block)
        self._file.write(block)
        self.num_bytes += memoryview(block).nbytes

    def finish(self) -> None:
        """Wait for the checksum; nothing may be written any more."""
        self._blocks.put(None)
        self._thread.join()

    def entry(self) -> dict[str, Any]:
        """Size and checksum, as a manifest lists them; after :meth:`finish`."""
        return {"bytes": self.num_bytes, "sha256": self._hash.hexdigest()}


@contextmanager
def hashed_file(path: Path) -> Iterator[HashedFile]:
    """Open a new file to write; what was written is on disk at the end, and its checksum known."""
    with path.open("wb") as file:
        hashed = HashedFile(file)
        try:
            yield hashed
            file.flush()
            os.fsync(file.fileno())
        finally:
            hashed.finish()
