"""What a checkpoint folder holds, and how its parts are called."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

FORMAT = 2
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest"
ABANDONED_FOLDER = "abandoned"
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds. Tensors are complete on the main rank and empty elsewhere."""

    step: int
    model: dict[str, Tensor]
    """fp32 weights and temperature under open_clip's names."""

    optimizer: dict[str, Tensor]
    """Moments of encoders and temperature."""

    rank_state: dict[str, Any]
    """This rank's own: random states, its part of per-sample tables. Tensors and plain values."""

    shared: dict[str, Any]
    """Counters, data position and settings, JSON; the same on all ranks."""

    rank_states: tuple[dict[str, Any], ...] = ()
    """Loaded only: the ``rank_state`` of every rank of the run that saved."""


def step_folder(checkpoints: Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` optimizer steps."""
    return checkpoints / f"step_{step:08d}"


def partial_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is put together."""
    return checkpoints / f".step_{step:08d}.partial"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for any other name (a user's copy)."""
    found = re.fullmatch(r"step_(\d{8,})", folder.name)
    return int(found[1]) if found else None


def complete_folders(checkpoints: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    steps = {path: step_of(path) for path in checkpoints.glob("step_*") if path.is_dir()}
    return sorted(
        (path for path, step in steps.items() if step is not None),
        key=lambda path: steps[path] or 0,
    )


def leftovers(checkpoints: Path) -> list[Path]:
    """What killed saves left behind."""
    return sorted(checkpoints.glob(".step_*"))


def rank_file(rank: int) -> str:
    """File of one rank's own state."""
    return f"rank_{rank:05d}.pt"


def digest(path: Path) -> str:
    """SHA-256 of a file's content; needs memory for one block."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    from importlib import metadata

    names = ("disco_ds", "torch", "deepspeed", "open_clip_torch", "webdataset")
    return {name: metadata.version(name) for name in names}


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration dataclass as JSON-ready values."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return plain
