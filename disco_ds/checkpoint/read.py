"""Read a checkpoint back, on any number of ranks, after checking every byte of it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from disco_ds.checkpoint.folder import (
    FORMAT,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Snapshot,
    complete_folders,
    digest,
    rank_file,
)
from disco_ds.distributed import World, agreed, gather_objects


def verify_checkpoint(folder: Path, *, share: tuple[int, int] = (0, 1)) -> None:
    """Check every file's size and, of this share ``(part, parts)`` of the files, the checksum.

    Raises:
        ValueError: naming the file that is missing, of another size, or altered.
    """
    manifest = _read_manifest(folder)
    for number, (name, expected) in enumerate(sorted(manifest.items())):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: missing from the checkpoint{_remedy(folder)}")
        if path.stat().st_size != expected["bytes"] or (
            number % share[1] == share[0] and digest(path) != expected["sha256"]
        ):
            raise ValueError(
                f"{path}: damaged (size or checksum differs from {MANIFEST_FILE}){_remedy(folder)}"
            )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text())
        parts = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: missing or damaged ({error}){_remedy(folder)}") from error
    for name in (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, rank_file(0)):
        if name not in parts:
            raise ValueError(f"{path}: damaged, it does not list {name}{_remedy(folder)}")
    return dict(manifest)


def _remedy(folder: Path) -> str:
    others = [path for path in complete_folders(folder.parent) if path.name != folder.name]
    if not others:
        return ". No other checkpoint lies beside it"
    return f". To go on from another one: --resume {others[-1]}"


def load_checkpoint(folder: Path, world: World) -> Snapshot:
    """Read and verify a checkpoint.

    Collective. The ranks of a node share the work of checksums; tensors are memory-mapped, so a
    rank reads what it takes over.

    Raises:
        ValueError: on all ranks: damaged or incomplete, or ranks see different checkpoints.
    """
    share = _share_of_node(world)
    with agreed(world):
        verify_checkpoint(folder, share=share)
    seen = gather_objects(digest(folder / MANIFEST_FILE), world)
    with agreed(world):
        if len(set(seen)) > 1:
            other = next(rank for rank, found in enumerate(seen) if found != seen[0])
            raise ValueError(
                f"--resume: rank {other} and rank 0 see different checkpoints in {folder}: is it "
                "on a file system that all nodes share?"
            )
        return _read(folder)


def _share_of_node(world: World) -> tuple[int, int]:
    nodes = gather_objects(platform.node(), world)
    neighbours = [rank for rank, node in enumerate(nodes) if node == nodes[world.rank]]
    return neighbours.index(world.rank), len(neighbours)


def _read(folder: Path) -> Snapshot:
    from safetensors.torch import load_file

    shared = json.loads((folder / STATE_FILE).read_text())
    if (found := shared.pop("format")) != FORMAT:
        raise ValueError(
            f"{folder}: checkpoint format {found}, this release of disco_ds reads {FORMAT}; its "
            f"weights can be used: --model.init {folder / MODEL_FILE}"
        )
    rank_states = tuple(
        torch.load(folder / rank_file(rank), weights_only=True, mmap=True, map_location="cpu")
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
