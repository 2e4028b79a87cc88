"""Harnesses at pinned versions, each in a folder of its own in Leyden's cache, installed once and checked.

npm takes the newest version that fits the local Node when none is named, down to years-old builds and placeholders, so
every version here is exact and Node itself comes as a package.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from leyden.models import cache_dir

INSTALL_SECONDS = 900
NODE = "node@22.23.3"


class InstallError(Exception):
    """A harness couldn't be installed; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Npm:
    """npm packages as `name@version`, and a Node 22 beside them. `check` is a command of theirs that must answer."""

    packages: tuple[str, ...]
    check: tuple[str, ...] = ("node", "--version")


@dataclass(frozen=True, slots=True)
class Python:
    """A virtual environment with pinned packages. `bare` ones are installed without what they ask for."""

    packages: tuple[str, ...]
    check: tuple[str, ...]
    bare: tuple[str, ...] = ()
    version: str | None = None
    """Least Python, when it is more than Leyden's own."""


def installed(name: str, what: Npm | Python) -> Path:
    """The folder that holds `what`: with the programs in `bin` (Python) or `node_modules/.bin` (npm).

    Raises:
        InstallError: with the end of what the installer said.
    """
    mark = hashlib.sha256(repr(what).encode()).hexdigest()[:12]
    folder = cache_dir() / "conformance" / f"{name}-{mark}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            started = time.monotonic()
            print(f"installing {name} …", flush=True)
            if isinstance(what, Npm):
                _npm(name, what, folder)
            else:
                _python(name, what, folder)
            _run(name, [*what.check], folder, search_path(folder))
            (folder / ".installed").write_text(f"{time.monotonic() - started:.0f} s\n")
    return folder


def search_path(folder: Path) -> str:
    """PATH with the folder's own programs first."""
    own = [folder / "node_modules" / "node" / "bin", folder / "node_modules" / ".bin", folder / "bin"]
    return os.pathsep.join([*(str(p) for p in own if p.is_dir()), os.environ.get("PATH", "")])


def _npm(name: str, what: Npm, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError(f"{name}: npm is needed; install Node.js")
    (folder / "package.json").write_text(json.dumps({"name": "harness", "private": True, "type": "module"}))
    # Node first: packages look at the Node that installs them.
    for packages in ((NODE,), what.packages):
        quiet = ["--no-audit", "--no-fund", "--loglevel=error", "--save-exact"]
        _run(name, [npm, "install", *quiet, *packages], folder, search_path(folder))


def _python(name: str, what: Python, folder: Path) -> None:
    _run(name, [_interpreter(name, what.version), "-m", "venv", "--clear", str(folder)], folder.parent, None)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run(name, [*pip, *what.packages], folder, None)
    if what.bare:
        _run(name, [*pip, "--no-deps", *what.bare], folder, None)


def _interpreter(name: str, least: str | None) -> str:
    if least is None or sys.version_info >= tuple(map(int, least.split("."))):
        return sys.executable
    for minor in range(int(least.split(".")[1]), 20):
        found = shutil.which(f"python3.{minor}")
        root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        kept = sorted(root.glob(f"3.{minor}.*/bin/python3"))
        for candidate in ([found] if found else []) + [str(k) for k in kept]:
            if subprocess.run([candidate, "--version"], capture_output=True, timeout=60, check=False).returncode == 0:
                return candidate
    raise InstallError(f"{name}: it needs Python {least} or newer, and none was found")


def _run(name: str, command: list[str], where: Path, path: str | None) -> None:
    environment = {**os.environ, **({"PATH": path} if path else {})}
    try:
        done = subprocess.run(
            command,
            cwd=where,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise InstallError(f"{name}: {command[0]} failed: {e}") from e
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise InstallError(f"{name}: {' '.join(command[:4])} … exited {done.returncode}:\n{tail}")
