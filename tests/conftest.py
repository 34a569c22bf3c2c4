from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

for folder in (".", "distributed", "faults"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from harness import start_forkserver  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    _hear_signals()
    start_forkserver()


def _hear_signals() -> None:
    """What nohup or a shell's ``&`` made this process ignore, its children would ignore as well."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests and the matrix run when asked for by mark, GPU tests where there is a GPU."""
    import torch

    wanted = config.option.markexpr
    deselected = [
        item
        for item in items
        if (marks := {"slow", "matrix"} & set(item.keywords))
        and not any(mark in wanted for mark in marks)
    ]
    deselected += [
        item for item in items if "gpu" in item.keywords and not torch.cuda.is_available()
    ]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
