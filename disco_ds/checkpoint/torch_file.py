"""``torch.save`` that says why it failed: its own error hides that the disk is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save(content: Any, path: Path) -> None:
    """Write ``content`` to ``path``.

    Raises:
        OSError: disk full, no permission ...
    """
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError):
                raise cause from error
            cause = cause.__cause__ or cause.__context__
        raise
