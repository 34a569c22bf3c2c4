"""Which checkpoint ``--resume`` means."""

from __future__ import annotations

from pathlib import Path

from disco_ds.checkpoint.folder import LATEST_FILE, MANIFEST_FILE, complete_folders


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The folder that ``--resume`` means: "latest" of this run, or a checkpoint or run folder.

    Returns None when "latest" finds no checkpoint (the run starts fresh).

    Raises:
        ValueError: an explicit path that holds no checkpoint, or ``latest`` names one that is gone.
    """
    if resume == "latest":
        return _latest(run_dir / "checkpoints")
    path = Path(resume)
    if (path / MANIFEST_FILE).is_file():
        return path
    for checkpoints in (path / "checkpoints", path):
        if (found := _latest(checkpoints)) is not None:
            return found
    raise ValueError(f"{resume}: no complete checkpoint there{_what_is_missing(path)}")


def _what_is_missing(path: Path) -> str:
    if not path.exists():
        return " (no such folder). Give a run folder or one of its checkpoints/step_XXXXXXXX"
    if path.name.startswith("step_"):
        return f": {MANIFEST_FILE} is missing"
    return ". Give a run folder or one of its checkpoints/step_XXXXXXXX"


def _latest(checkpoints: Path) -> Path | None:
    """The folder ``latest`` names; without that file, the newest."""
    folders = complete_folders(checkpoints)
    pointer = checkpoints / LATEST_FILE
    name = pointer.read_text().strip() if pointer.is_file() else ""
    if not name:
        return folders[-1] if folders else None
    if checkpoints / name in folders:
        return checkpoints / name
    others = ", ".join(str(folder) for folder in folders) or "none"
    raise ValueError(
        f"{pointer} names {name}, which is not there; found {others}. Resume from one of them by "
        "its path, or delete the file to take the newest (or to start fresh where none is left)"
    )
