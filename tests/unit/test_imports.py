"""What an import brings along: losses torch alone, the configuration no engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
import {module}
"""
ENGINES = {"deepspeed", "accelerate", "submitit", "transformers", "wandb"}
ALL_BUT_TORCH = ENGINES | {"open_clip", "webdataset", "tyro", "pydantic", "PIL", "tensorboard"}


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("disco_ds", ALL_BUT_TORCH | {"torch", "numpy"}),
        ("disco_ds.losses", ALL_BUT_TORCH | {"timm", "safetensors"}),
        ("disco_ds.config", ENGINES),
        ("disco_ds.cli", ENGINES),
    ],
)
def test_module_imports_without(module: str, blocked: set[str]) -> None:
    code = BLOCK.format(module=module, blocked=blocked)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
