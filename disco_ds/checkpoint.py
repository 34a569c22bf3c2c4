"""Save, find, resume and export training states. The same form for every strategy and any W.

A checkpoint is a folder that is complete or absent::

    checkpoints/step_00000100/
        model.safetensors        fp32 weights and temperature under open_clip's names: an export
        optimizer.safetensors    moments, "exp_avg/NAME" ...
        rank_00000.pt            random state of each rank, its part of per-sample tables
        state.json               step, counters, data position, configuration, versions
        manifest.json            name, size and SHA-256 of each file; written last
    checkpoints/latest           name of the newest complete folder

It is written under a temporary name and renamed; then ``latest`` moves. Everything loads without
pickle (``weights_only``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

from disco_ds.distributed import World, agreed, gather_objects

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save."""

    every_steps: int = 1000
    """Save after every so many optimizer steps, and at the end."""

    keep_last: int = 2
    """How many of the newest checkpoints to keep."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep_last < 1:
            raise ValueError(
                f"--checkpoint.every_steps {self.every_steps} and --checkpoint.keep_last "
                f"{self.keep_last}: must be at least 1"
            )


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


def save_checkpoint(checkpoints: Path, snapshot: Snapshot, world: World, *, keep: int) -> Path:
    """Write a checkpoint from all ranks together; it counts only when every rank succeeded.

    Collective: three gathers of small objects.

    Raises:
        ValueError: on all ranks, when any of them could not write; older ones stay as they were.
    """
    final = step_folder(checkpoints, snapshot.step)
    partial = final.with_name(f".{final.name}.partial")
    for phase in (_prepare, _write):
        with agreed(world), _explained(final):
            phase(partial, snapshot, world)
    with agreed(world), _explained(final):
        _commit(partial, final, keep, world)
    return final


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot save the checkpoint {folder}: {error}") from error


def _prepare(partial: Path, snapshot: Snapshot, world: World) -> None:
    if world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)


def _write(partial: Path, snapshot: Snapshot, world: World) -> None:
    torch.save(snapshot.rank_state, partial / _rank_file(world.rank))
    if not world.is_main:
        return
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in snapshot.model.items()}, partial / MODEL_FILE)
    save_file({k: v.contiguous() for k, v in snapshot.optimizer.items()}, partial / OPTIMIZER_FILE)
    state = {
        "format": FORMAT,
        "step": snapshot.step,
        "world_size": world.world_size,
        "versions": versions(),
        **snapshot.shared,
    }
    (partial / STATE_FILE).write_text(json.dumps(state, indent=1))


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    from importlib import metadata

    names = ("disco_ds", "torch", "deepspeed", "open_clip_torch", "webdataset")
    return {name: metadata.version(name) for name in names}


def _commit(partial: Path, final: Path, keep: int, world: World) -> None:
    if not world.is_main:
        return
    files = sorted(path for path in partial.iterdir())
    manifest = {
        path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files
    }
    (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    pointer = final.parent / "latest.partial"
    pointer.write_text(final.name + "\n")
    pointer.replace(final.parent / "latest")
    for old in sorted(final.parent.glob("step_*"))[:-keep]:
        if old != final:
            shutil.rmtree(old)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The folder that ``--resume`` means: "latest" of this run, or a checkpoint or run folder.

    Returns None when "latest" finds no checkpoint (the run starts fresh).

    Raises:
        ValueError: an explicit path that holds no checkpoint.
    """
    if resume == "latest":
        return _latest(run_dir / "checkpoints")
    path = Path(resume)
    found = path if (path / MANIFEST_FILE).is_file() else _latest(path / "checkpoints")
    if found is None:
        raise ValueError(
            f"{resume}: no complete checkpoint there. Give a run folder or one of its "
            "checkpoints/step_XXXXXXXX"
        )
    return found


def _latest(checkpoints: Path) -> Path | None:
    pointer = checkpoints / "latest"
    if not pointer.is_file():
        return None
    return checkpoints / pointer.read_text().strip()


def verify_checkpoint(folder: Path) -> None:
    """Check every file against the manifest.

    Raises:
        ValueError: naming the file that is missing, of another size, or altered.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: not a complete checkpoint: {error}") from error
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: missing from the checkpoint")
        if path.stat().st_size != expected["bytes"] or _digest(path) != expected["sha256"]:
            raise ValueError(f"{path}: damaged (size or checksum differs from {MANIFEST_FILE})")


def load_checkpoint(folder: Path, world: World) -> Snapshot:
    """Read and verify a checkpoint; every rank reads the whole of it.

    Collective.

    Raises:
        ValueError: on all ranks: damaged or incomplete, or ranks see different checkpoints.
    """
    with agreed(world):
        verify_checkpoint(folder)
        snapshot = _read(folder)
    steps = gather_objects(snapshot.step, world)
    if len(set(steps)) > 1:
        raise ValueError(
            f"--resume: ranks see different checkpoints (steps {steps}): is {folder} on a file "
            "system that all nodes share?"
        )
    return snapshot


def _read(folder: Path) -> Snapshot:
    from safetensors.torch import load_file

    shared = json.loads((folder / STATE_FILE).read_text())
    if shared.pop("format") != FORMAT:
        raise ValueError(f"{folder}: written by another release of disco_ds")
    # Memory-mapped: a rank touches the parts of other ranks' tables that it takes over.
    rank_states = tuple(
        torch.load(folder / _rank_file(rank), weights_only=True, mmap=True)
        for rank in range(shared["world_size"])
    )
    return Snapshot(
        step=shared.pop("step"),
        model=load_file(folder / MODEL_FILE),
        optimizer=load_file(folder / OPTIMIZER_FILE),
        rank_state={},
        shared=shared,
        rank_states=rank_states,
    )


@dataclass(frozen=True)
class ExportCommand:
    """Write the weights of a run or checkpoint as an open_clip file.

    The model's configuration is written beside it, so that open_clip can build the model.
    """

    source: tyro.conf.Positional[Path]
    """A run folder or a checkpoint folder."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """File to write: .pt or .safetensors."""

    def run(self) -> int:
        """Export; returns the exit status."""
        path = export(self.source, self.output)
        print(path)  # noqa: T201
        return 0


def export(source: Path, output: Path) -> Path:
    """Copy a checkpoint's weights to ``output`` with open_clip's names and 0-D scalars.

    One process, no GPU. ``open_clip.create_model(NAME, pretrained=output)`` loads it.

    Raises:
        ValueError: no complete checkpoint in ``source``, or ``output`` has another ending.
    """
    from safetensors.torch import load_file, save_file

    if output.suffix not in (".pt", ".safetensors"):
        raise ValueError(f"{output}: an export ends in .pt or .safetensors")
    folder = find_checkpoint(source, str(source))
    assert folder is not None
    verify_checkpoint(folder)
    state = json.loads((folder / STATE_FILE).read_text())
    weights = load_file(folder / MODEL_FILE)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    if output.suffix == ".pt":
        torch.save(
            {"name": state["model"], "epoch": state["epoch"], "state_dict": weights}, partial
        )
    else:
        save_file(weights, partial)
    partial.replace(output)
    output.with_suffix(".json").write_text(state["model_config"])
    return output


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration dataclass as JSON-ready values."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return plain
