"""A copy of the code in the run folder, so that a queued job runs what was submitted."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import disco_ds

PARTS = ("disco_ds", "ds_configs", "launchers", "train.py", "setup.cfg", "pyproject.toml")
STUB = '''"""Starts disco_ds from this snapshot, whatever else is installed."""

from disco_ds.launch.worker import main

raise SystemExit(main())
'''


def take_snapshot(folder: Path) -> Path:
    """Copy the package that is running, and what belongs to it, into ``folder``.

    Leaves ``revision.json`` (git revision, whether there were changes), ``changes.diff`` if there
    were, and ``disco_worker.py``, which starts a rank from the copy. An existing copy is replaced.
    """
    package = Path(disco_ds.__file__).parent
    aside = folder.with_name(f".{folder.name}")
    for stale in (aside, folder):
        shutil.rmtree(stale, ignore_errors=True)
    aside.mkdir(parents=True)
    for name in PARTS:
        source = package if name == "disco_ds" else package.parent / name
        if source.is_dir():
            shutil.copytree(source, aside / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, aside / name)
    (aside / "disco_worker.py").write_text(STUB)
    _write_revision(package.parent, aside)
    aside.rename(folder)
    return folder


def _write_revision(root: Path, folder: Path) -> None:
    revision = _git(root, "rev-parse", "HEAD") if (root / "setup.cfg").exists() else None
    changes = _git(root, "diff", "HEAD", "--", *PARTS) if revision else None
    content = {
        "git_revision": revision and revision.strip(),
        "changed": bool(changes),
        "version": getattr(disco_ds, "__version__", None),
    }
    (folder / "revision.json").write_text(json.dumps(content, indent=2) + "\n")
    if changes:
        (folder / "changes.diff").write_text(changes)


def _git(root: Path, *arguments: str) -> str | None:
    """What git says; None without git or a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
