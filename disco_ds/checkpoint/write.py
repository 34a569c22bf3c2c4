"""Write a checkpoint from all ranks together: complete or absent, now or in the background."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from disco_ds.checkpoint import torch_file
from disco_ds.checkpoint.config import CheckpointConfig
from disco_ds.checkpoint.folder import (
    ABANDONED_FOLDER,
    FORMAT,
    LATEST_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Snapshot,
    complete_folders,
    digest,
    leftovers,
    partial_folder,
    rank_file,
    step_folder,
    step_of,
    versions,
)
from disco_ds.checkpoint.hashed_file import hashed_file
from disco_ds.checkpoint.tensor_file import write_all
from disco_ds.distributed import AgreedError, World, agreed, gather_objects

logger = logging.getLogger(__name__)

Manifest = dict[str, dict[str, Any]]


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; the ones before are as they were. On every rank."""


class CheckpointWriter:
    """Writes one checkpoint at a time.

    All methods are collective unless they say otherwise: a few gathers of small objects each.

    Args:
        checkpoints: the run's ``checkpoints`` folder, on a file system that all ranks share.
        config: what to keep, and whether to write in the background.
        world: this process.
        first_step: where this run starts or resumes. Checkpoints of later steps that are there
            already belong to a history that was left behind: they are set aside.
    """

    def __init__(
        self, checkpoints: Path, config: CheckpointConfig, world: World, *, first_step: int = 0
    ) -> None:
        self._checkpoints, self._config, self._world = checkpoints, config, world
        self._first_step: int | None = first_step  # until they were set aside
        self._job: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """This rank is still writing. Not collective."""
        return self._job is not None and self._job.is_running

    @property
    def is_pending(self) -> bool:
        """A checkpoint waits for :meth:`finish`; the same on all ranks. Not collective."""
        return self._job is not None

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, or begin to write it in the background.

        It counts once every rank succeeded: at the end of this call, or of :meth:`finish`.

        Raises:
            SaveFailed: on all ranks, when any of them could not write.
        """
        self.finish()
        partial = partial_folder(self._checkpoints, snapshot.step)
        self._together(snapshot.step, lambda: self._prepare(partial))
        if self._config.background:
            snapshot = _own_copy(snapshot)
        self._job = _Job(snapshot, partial, self._world, in_background=self._config.background)
        if not self._config.background:
            self.finish()

    def finish(self) -> None:
        """Wait for the files of all ranks; rename, point ``latest`` to them, remove old ones.

        Raises:
            SaveFailed: on all ranks, when any of them could not write.
        """
        job, self._job = self._job, None
        if job is None:
            return
        step, own = job.snapshot.step, Manifest()

        def wait() -> None:
            own.update(job.result())

        self._together(step, wait)
        parts = gather_objects(own, self._world)
        manifest = {name: entry for part in parts for name, entry in part.items()}
        self._together(step, lambda: self._commit(step, manifest))

    def _together(self, step: int, action: Callable[[], None]) -> None:
        """Run on every rank; the failure of one is the failure of all."""
        try:
            with agreed(self._world):
                action()
        except AgreedError as error:
            if self._world.is_main:
                shutil.rmtree(partial_folder(self._checkpoints, step), ignore_errors=True)
            raise SaveFailed(
                f"cannot save the checkpoint {step_folder(self._checkpoints, step)}: {error}. "
                "Earlier checkpoints are as they were"
            ) from error

    def _prepare(self, partial: Path) -> None:
        if not self._world.is_main:
            return
        for leftover in leftovers(self._checkpoints):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)

    def _commit(self, step: int, manifest: Manifest) -> None:
        if not self._world.is_main:
            return
        partial, final = (
            partial_folder(self._checkpoints, step),
            step_folder(self._checkpoints, step),
        )
        _check_sizes(partial, manifest)
        _write_text(partial / MANIFEST_FILE, json.dumps(manifest, indent=1))
        _flush_folder(partial)
        if final.exists():  # of the same step, before a resume from an earlier one
            self._set_aside([final])
        partial.rename(final)
        _flush_folder(self._checkpoints)
        pointer = self._checkpoints / f".{LATEST_FILE}.partial"
        _write_text(pointer, final.name + "\n")
        pointer.replace(self._checkpoints / LATEST_FILE)
        _flush_folder(self._checkpoints)
        try:
            self._leave_behind(step)
            self._prune(step)
        except OSError as error:
            logger.warning("%s is complete, but old ones could not be tidied up: %s", final, error)

    def _leave_behind(self, step: int) -> None:
        """Once, after the first save: set aside what a resume from an earlier step left behind."""
        first, self._first_step = self._first_step, None
        if first is not None:
            steps = {folder: step_of(folder) or 0 for folder in complete_folders(self._checkpoints)}
            self._set_aside([f for f, its in steps.items() if its > first and its != step])

    def _set_aside(self, folders: Sequence[Path]) -> None:
        aside = self._checkpoints / ABANDONED_FOLDER
        for folder in folders:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / folder.name, ignore_errors=True)
            folder.rename(aside / folder.name)
            logger.warning(
                "%s is of a history that this run does not continue: moved to %s", folder, aside
            )

    def _prune(self, step: int) -> None:
        """Remove what nothing asks to keep."""
        for old in [*self._outdated(step), *leftovers(self._checkpoints)]:
            shutil.rmtree(old)

    def _outdated(self, step: int) -> list[Path]:
        folders = complete_folders(self._checkpoints)
        kept = {step_folder(self._checkpoints, step), *folders[-self._config.keep_last :]}
        return [folder for folder in folders if folder not in kept and not self._is_kept(folder)]

    def _is_kept(self, folder: Path) -> bool:
        every = self._config.keep_every_steps
        return every is not None and (step_of(folder) or 0) % every == 0


class _Job:
    """The files of this rank, written at once or by a thread."""

    def __init__(
        self, snapshot: Snapshot, partial: Path, world: World, *, in_background: bool
    ) -> None:
        self.snapshot = snapshot
        self._partial, self._world = partial, world
        self._manifest: Manifest = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        if in_background:
            self._thread.start()
        else:
            self._run()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._manifest = _write_files(self._partial, self.snapshot, self._world)
        except Exception as error:
            self._error = error

    def result(self) -> Manifest:
        """Wait; names, sizes and checksums of the files written.

        Raises:
            OSError: disk full, no permission ...
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise OSError(_reason(self._error, self._partial)) from self._error
        return self._manifest


def _reason(error: Exception, partial: Path) -> str:
    if not partial.is_dir():
        return f"this rank does not see {partial}: do all nodes share that file system?"
    return str(error)


def _write_files(partial: Path, snapshot: Snapshot, world: World) -> Manifest:
    own = partial / rank_file(world.rank)
    torch_file.save(snapshot.rank_state, own)
    manifest = {own.name: _flushed(own)}
    if world.is_main:
        state = {
            "format": FORMAT,
            "step": snapshot.step,
            "world_size": world.world_size,
            "versions": versions(),
            **snapshot.shared,
        }
        _write_text(partial / STATE_FILE, json.dumps(state, indent=1))
        manifest[STATE_FILE] = _flushed(partial / STATE_FILE)
        manifest |= _write_tensors(partial, snapshot)
    return manifest


def _write_tensors(partial: Path, snapshot: Snapshot) -> Manifest:
    files = {}
    with ExitStack() as stack:
        for name, tensors in (
            (MODEL_FILE, snapshot.model),
            (OPTIMIZER_FILE, snapshot.optimizer),
        ):
            # Both are open to the end: one goes to disk while the other is written.
            files[name] = stack.enter_context(hashed_file(partial / name))
            write_all(files[name], tensors)
    return {name: file.entry() for name, file in files.items()}


def _flushed(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def _check_sizes(partial: Path, manifest: Manifest) -> None:
    for name, entry in manifest.items():
        path = partial / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise ValueError(
                f"the main rank does not see {path} as it was written: do all nodes share that "
                "file system?"
            )


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot
        pass
    finally:
        os.close(descriptor)


def _own_copy(snapshot: Snapshot) -> Snapshot:
    """What this rank's tensors are now: training changes per-sample tables in place."""
    return Snapshot(
        snapshot.step,
        snapshot.model,
        snapshot.optimizer,
        _copied(snapshot.rank_state),
        snapshot.shared,
    )


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value
