"""Size and checksum of a file, without reading it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disco_ds.checkpoint.folder import digest
from disco_ds.checkpoint.hashed_file import hashed_file
from disco_ds.checkpoint.tensor_file import write_all


def test_what_is_on_disk_has_that_checksum(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(1 << 20),
        "a": torch.randn(300, 7, dtype=torch.float64).T,
        "nothing": torch.empty(0),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    }
    with hashed_file(tmp_path / "file") as file:
        write_all(file, tensors)
    size = (tmp_path / "file").stat().st_size
    assert size > 4 << 20
    assert file.entry() == {"bytes": size, "sha256": digest(tmp_path / "file")}


def test_an_error_while_writing_is_told(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), hashed_file(tmp_path / "full") as file:
        write_all(file, {"a": torch.zeros(1 << 20)})
