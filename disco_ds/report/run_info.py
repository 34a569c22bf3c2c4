"""What a run writes down about itself: ``run.json`` at the start, ``outcome.json`` at the end.

Both are for people and the report; nothing of a run depends on them, so that failing to write
them is a warning.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from disco_ds.distributed import World
from disco_ds.report.record import INFO_FILE, OUTCOME_FILE

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"
PACKAGES = ("disco_ds", "torch", "deepspeed", "open_clip_torch", "webdataset", "numpy")

Status = Literal["done", "failed", "stopped"]


def record_start(run_dir: Path, world: World, **facts: Any) -> None:
    """Write ``run.json``: command, machine, ranks, versions and ``facts``; main rank only.

    Removes the outcome of an earlier life of the run. Never raises.
    """
    if not world.is_main:
        return
    import torch

    info = {
        "command": shlex.join(sys.argv),
        "started": _now(),
        "world_size": world.world_size,
        "device": _device_name(world),
        "machine": platform.node(),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} CPU cores",
        "versions": versions() | {"cuda": torch.version.cuda or "none"},
        **facts,
    }
    try:
        _write(run_dir / INFO_FILE, info)
        (run_dir / OUTCOME_FILE).unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as error:
        logger.warning("%s: not written: %s", run_dir / INFO_FILE, error)


def finish_run(run_dir: Path, world: World, status: Status, reason: str = "") -> Path | None:
    """Write how the run ended and its report; returns the report's path. Main rank only.

    Never raises: called at the end of every run, of a failed one too, where an error of the
    report must not hide the reason.
    """
    if not world.is_main or not run_dir.is_dir():
        return None
    try:
        _write(run_dir / OUTCOME_FILE, {"status": status, "reason": reason, "ended": _now()})
    except OSError as error:
        logger.warning("%s: not written: %s", run_dir / OUTCOME_FILE, error)
    return refresh_report(run_dir, world)


@contextmanager
def reported(
    run_dir: Path, world: World, *, stopped: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
) -> Iterator[None]:
    """Write outcome and report however the body ends; what it raises goes on.

    Args:
        run_dir: the run folder.
        world: this process.
        stopped: exceptions that mean that the run was asked to stop.
    """
    try:
        yield
    except BaseException as error:
        lines = str(error).splitlines() or [type(error).__name__]
        finish_run(run_dir, world, "stopped" if isinstance(error, stopped) else "failed", lines[0])
        raise
    finish_run(run_dir, world, "done")


def refresh_report(run_dir: Path, world: World) -> Path | None:
    """Write the report of a run as it is now; main rank only. Never raises.

    Called while the run goes on, too: one that is killed has a report all the same.
    """
    if not world.is_main:
        return None
    try:
        from disco_ds.report.page import write_report

        return write_report([run_dir], run_dir / REPORT_FILE)
    except Exception as error:
        logger.warning("%s: no report: %s", run_dir, error)
        return None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _device_name(world: World) -> str:
    import torch

    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return platform.processor() or platform.machine()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
