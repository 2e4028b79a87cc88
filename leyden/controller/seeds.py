"""What a fresh workspace holds before its agent starts: a folder's copy, a git revision, a tarball, templated files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leyden.controller.commands import Unusable, render
from leyden.controller.logfile import last_line
from leyden.controller.processes import Exited, ProcessTable, kill_group, spawn
from leyden.schema import WorkspaceSpec

SEED_SECONDS = 600.0
"""Longest that one git command may take."""

_FICLONE = 0x40049409
_CANT_CLONE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS}
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_GIT = [
    "git",
    "-c",
    "safe.directory=*",
    "-c",
    "init.templateDir=",
    "-c",
    "gc.auto=0",
    "-c",
    "advice.detachedHead=false",
]


class Seeds:
    """Fills workspaces. `cache` gets a bare copy of each git repository, and is kept."""

    def __init__(self, table: ProcessTable, base: Path, cache: Path, env: Mapping[str, str]) -> None:
        self._table = table
        self._base = base
        self._cache = cache
        self._env = {
            **env,
            "GIT_TERMINAL_PROMPT": "0",
            # A task's field must not name a program to run.
            "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        }
        self._commits: dict[tuple[str, str], str] = {}
        """What a branch or tag is, looked up once, so that a run's workspaces are alike."""
        self._turns: dict[str, asyncio.Lock] = {}

    async def fill(self, spec: WorkspaceSpec, task: Any, workspace: Path, stop: asyncio.Event) -> None:
        """Fill an empty workspace for a task.

        Raises:
            Unusable: with a sentence that says what can't be had.
            OSError: the workspace can't be written.
        """
        name = "agent.workspace"
        if spec.directory is not None:
            source = self._base / render(spec.directory, task, f"{name}.directory")
            if not await asyncio.to_thread(source.is_dir):
                raise Unusable(f"{name}.directory: there is no folder {str(source)!r}")
            await asyncio.to_thread(copy_tree, source, workspace)
        elif spec.tarball is not None:
            source = self._base / render(spec.tarball, task, f"{name}.tarball")
            await asyncio.to_thread(_unpack, source, workspace, f"{name}.tarball")
        elif spec.git is not None:
            repository = render(spec.git, task, f"{name}.git")
            revision = render(spec.revision, task, f"{name}.revision")
            if repository.startswith("-") or revision.startswith("-"):
                raise Unusable(f"{name}: neither repository nor revision may begin with '-': {repository} {revision}")
            await self._check_out(repository, revision, workspace, stop)
        for path, text in spec.files.items():
            _write(workspace, path, render(text, task, f"{name}.files[{path!r}]"))

    async def _check_out(self, repository: str, revision: str, workspace: Path, stop: asyncio.Event) -> None:
        """The files of one revision, in a repository that knows that revision only: nothing of what came later."""
        local = self._base / repository
        if await asyncio.to_thread(local.is_dir):
            repository = str(local)
        async with self._turns.setdefault(repository, asyncio.Lock()):
            copy = self._cache / hashlib.sha256(repository.encode()).hexdigest()[:32]
            commit = await self._fetch(repository, revision, copy, stop)
        here = ["-C", str(workspace)]
        await self._git([*here, "init", "--quiet"], stop)
        await self._git([*here, "fetch", "--quiet", "--depth=1", f"file://{copy}", commit], stop)
        await self._git([*here, "checkout", "--quiet", "--detach", commit], stop)
        (workspace / ".git" / "FETCH_HEAD").unlink(missing_ok=True)

    async def _fetch(self, repository: str, revision: str, copy: Path, stop: asyncio.Event) -> str:
        """Have `revision` in `copy`; returns its commit."""
        known = self._commits.get((repository, revision))
        if known is not None:
            return known
        if not await asyncio.to_thread((copy / "HEAD").exists):
            await self._git(["init", "--quiet", "--bare", str(copy)], stop)
            await self._git(["-C", str(copy), "config", "uploadpack.allowAnySHA1InWant", "true"], stop)
        here = ["-C", str(copy)]
        commit = await self._commit(revision, here, stop) if _COMMIT.fullmatch(revision) else None
        if commit is None:
            wanted = ["+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"]
            await self._git([*here, "fetch", "--quiet", "--no-tags", repository, *wanted], stop)
            commit = await self._commit(revision, here, stop)
        if commit is None:
            # Of no branch: a pull request's, say. Some servers give these out by their hash.
            try:
                await self._git([*here, "fetch", "--quiet", repository, revision], stop)
            except Unusable as e:
                raise Unusable(f"the repository {repository!r} has no revision {revision!r}: {e}") from None
            commit = await self._commit("FETCH_HEAD", here, stop)
        assert commit is not None
        self._commits[repository, revision] = commit
        return commit

    async def _commit(self, revision: str, here: list[str], stop: asyncio.Event) -> str | None:
        try:
            said = await self._git([*here, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"], stop)
        except Unusable:
            return None
        return said.strip()

    async def _git(self, arguments: list[str], stop: asyncio.Event) -> str:
        """What a git command says.

        Raises:
            Unusable: it failed, took too long or isn't installed.
        """
        what = f"git {arguments[2] if arguments[0] == '-C' else arguments[0]}"
        with tempfile.TemporaryFile() as output:
            try:
                process = spawn(
                    [*_GIT, *arguments], env=self._env, cwd="/", stdout=output.fileno(), stderr=output.fileno()
                )
            except (OSError, ValueError, subprocess.SubprocessError) as e:
                raise Unusable(f"can't run git: {e}") from None
            self._table.exempt(process.pid)
            exited = Exited(process.pid)
            try:
                ended = await exited.wait(SEED_SECONDS, stop)
            finally:
                kill_group(process.pid, 9)
                code = process.wait()
                exited.close()
                self._table.unexempt(process.pid)
            output.seek(0)
            said = output.read()
        if ended != "exited":
            raise Unusable(f"{what}: {'took longer than its time' if ended == 'timeout' else 'stopped'}")
        if code != 0:
            raise Unusable(f"{what} failed: {_fault(said) or f'exit code {code}'}")
        return said.decode("utf-8", "replace")


def _fault(said: bytes) -> str:
    """The line of git's that says what went wrong; advice may follow it."""
    fatal = [line for line in said.splitlines() if line.startswith((b"fatal: ", b"error: "))]
    return last_line(fatal[0] if fatal else said)


def copy_tree(source: Path, target: Path) -> None:
    """The content of a folder, symbolic links as they are; files share their blocks where the file system can."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=_copy_file)
    # The workspace stays its owner's alone, whatever the folder was.
    target.chmod(0o700)


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb") as a, open(target, "wb") as b:
        try:
            fcntl.ioctl(b, _FICLONE, a.fileno())
        except OSError as e:
            if e.errno not in _CANT_CLONE:
                raise
            shutil.copyfileobj(a, b, 1 << 20)
    shutil.copystat(source, target, follow_symlinks=False)


def _unpack(file: Path, target: Path, name: str) -> None:
    try:
        with tarfile.open(file) as tar:
            # The filter refuses what would land outside.
            tar.extractall(target, filter="data")
    except (tarfile.TarError, EOFError, OSError) as e:
        raise Unusable(f"{name}: can't unpack {str(file)!r}: {e}") from None


def _write(workspace: Path, path: str, text: str) -> None:
    place = workspace / path
    # A seed may hold symbolic links; what is written must not follow them out.
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.parent.resolve().is_relative_to(workspace.resolve()) or place.is_symlink():
        raise Unusable(f"agent.workspace.files: {path!r} leads out of the workspace")
    with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644), "w") as out:
        out.write(text)
