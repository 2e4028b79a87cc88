"""Folders and files of attempts: made for their owner only, deleted whatever an agent did to them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def make_empty(folder: Path) -> None:
    """Make a folder that only its owner sees. One that is there already, such as another gateway's rollout of the same
    name left it, is emptied."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        remove_tree(folder)
        folder.mkdir(mode=0o700)


def write_private(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def remove_tree(folder: Path) -> None:
    """Delete a folder, also where an agent took its own right to write away."""
    for path, _, _ in os.walk(folder):
        try:
            os.chmod(path, 0o700)
        except OSError:
            pass
    shutil.rmtree(folder, ignore_errors=True)
