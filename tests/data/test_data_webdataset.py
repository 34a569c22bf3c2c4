"""P-30: releases of webdataset differ in what their streams hold; we use what does not change."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path

import disco_ds.data

FOLDER = Path(disco_ds.data.__file__).parent
STABLE = {"base_plus_ext", "TarWriter"}


def used_names(source: str) -> set[str]:
    """What a module takes from webdataset."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("webdataset"):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "webdataset":
            names.add(node.attr)
    return names


def test_only_stable_names_of_webdataset_are_used() -> None:
    """The key rule and the writer are equal from 0.2.100 to 1.0.2; end-of-shard marks are not."""
    used = set().union(*(used_names(path.read_text()) for path in FOLDER.glob("*.py")))
    assert used == STABLE


def test_supported_range_is_in_the_metadata() -> None:
    config = configparser.ConfigParser()
    config.read(FOLDER.parents[1] / "setup.cfg")
    assert "webdataset>=0.2.100" in config["options"]["install_requires"]
