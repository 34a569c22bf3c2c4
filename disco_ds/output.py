"""Where results go is tried before the work that makes them."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def check_writable(path: Path, flag: str) -> None:
    """Before the work whose result goes to ``path``; makes its folder.

    Raises:
        ValueError: naming flag, path and reason.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot write there ({error.strerror})") from error
