"""Workspaces that hold something before their agent starts."""

from __future__ import annotations

import os
import subprocess
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.schema import Outcome, OutcomeReport, WorkspaceSpec
from tests.controller.fake import FakeGateway, make_claim

Running = Callable[..., Any]
LIST = "find . -path ./.git -prune -o ! -type d -print | sort; cat a.txt 2>/dev/null"


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, list[str]]:
    """A repository with three commits of a.txt, and their ids. The second is tagged."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    commits = []
    for number in range(3):
        (folder / "a.txt").write_text(f"version {number}\n")
        git(folder, "add", "a.txt")
        git(folder, "commit", "--quiet", "-m", f"commit {number}")
        commits.append(git(folder, "rev-parse", "HEAD"))
    git(folder, "tag", "second", commits[1])
    return folder, commits


def names_below(folder: Path) -> set[str]:
    return {name for _, _, files in os.walk(folder) for name in files}


async def run(
    gateway: FakeGateway, running: Running, workspace: dict[str, Any], command: Any = LIST, task: Any = None
) -> OutcomeReport:
    rollout_id = f"r-{uuid.uuid4().hex}"
    async with running():
        gateway.enqueue(make_claim(rollout_id, task or {}, {"agent": {"command": command, "workspace": workspace}}))
        return await gateway.outcome(rollout_id)


async def test_a_folder_is_copied_and_stays_as_it_was(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    seed = tmp_path / "seeds" / "one"
    (seed / "sub").mkdir(parents=True)
    (seed / "a.txt").write_text("original\n")
    (seed / "sub" / "tool").write_text("#!/bin/sh\necho ran\n")
    (seed / "sub" / "tool").chmod(0o755)
    (seed / "link").symlink_to("a.txt")
    command = f"sub/tool; {LIST}; echo changed > a.txt; rm sub/tool"
    report = await run(gateway, running, {"directory": "seeds/{{ input.name }}"}, command, {"name": "one"})
    assert report.outcome is Outcome.OK
    assert report.log_tail == "ran\n./a.txt\n./link\n./sub/tool\noriginal\n"
    assert (seed / "a.txt").read_text() == "original\n" and (seed / "sub" / "tool").exists()


async def test_a_tarball_is_unpacked(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("from a tarball\n")
    with tarfile.open(tmp_path / "seed.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "a.txt", "a.txt")
    report = await run(gateway, running, {"tarball": "seed.tar.gz"})
    assert report.log_tail == "./a.txt\nfrom a tarball\n"


async def test_a_tarball_cannot_write_outside(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with tarfile.open(tmp_path / "seed.tar", "w") as tar:
        tar.add(tmp_path / "a.txt", "../../escaped.txt")
    report = await run(gateway, running, {"tarball": "seed.tar"})
    assert report.outcome is Outcome.INFRA and "outside" in (report.reason or "")
    assert "escaped.txt" not in names_below(tmp_path)


@pytest.mark.parametrize(("revision", "number"), [("{{ input.commit }}", 0), ("second", 1), ("main", 2), ("HEAD", 2)])
async def test_a_git_revision_is_checked_out_without_what_came_later(
    gateway: FakeGateway,
    running: Running,
    repository: tuple[Path, list[str]],
    revision: str,
    number: int,
) -> None:
    folder, commits = repository
    workspace = {"git": "repository", "revision": revision}
    command = "cat a.txt; git log --format=%H; git status --short; "
    command += f"grep -r {folder} .git; git cat-file -t {commits[2]} || echo unknown"
    report = await run(gateway, running, workspace, command, {"commit": commits[0]})
    said = (report.log_tail or "").splitlines()
    assert said[:2] == [f"version {number}", commits[number]]
    assert said[-1] == ("unknown" if number != 2 else "commit")
    assert str(folder) not in (report.log_tail or "")


async def test_attempts_at_once_share_one_copy_of_a_repository(
    gateway: FakeGateway, running: Running, repository: tuple[Path, list[str]], tmp_path: Path
) -> None:
    commits = repository[1]
    async with running():
        for i in range(6):
            spec = {"git": str(repository[0]), "revision": commits[i % 3]}
            gateway.enqueue(make_claim(f"r{i}", {}, {"agent": {"command": "cat a.txt", "workspace": spec}}))
        reports = [await gateway.outcome(f"r{i}") for i in range(6)]
    assert [r.log_tail for r in reports] == [f"version {i % 3}\n" for i in range(6)], reports[0].reason
    assert len(list((tmp_path / "work" / "seeds").iterdir())) == 1


@pytest.mark.parametrize(
    ("workspace", "words"),
    [
        ({"directory": "nowhere"}, "there is no folder"),
        ({"tarball": "nowhere.tar"}, "nowhere.tar"),
        ({"git": "nowhere"}, "git fetch failed: fatal: 'nowhere' does not appear to be a git repository"),
        ({"git": "repository", "revision": "no-such"}, "has no revision 'no-such'"),
        ({"git": "--upload-pack=touch x"}, "may begin with '-'"),
        ({"git": "ext::sh -c 'touch pwned'"}, "git fetch failed: fatal: transport 'ext' not allowed"),
        ({"files": {"x": "{{ input.gone }}"}}, "the task has no field 'gone'"),
    ],
)
async def test_what_cannot_be_had_is_infra_and_says_what(
    gateway: FakeGateway, running: Running, repository: tuple[Path, list[str]], workspace: dict[str, Any], words: str
) -> None:
    report = await run(gateway, running, workspace)
    assert report.outcome is Outcome.INFRA and words in (report.reason or ""), report.reason


async def test_files_are_templates_and_come_last(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "a.txt").write_text("old")
    files = {"a.txt": "{{ input.q }} 'as it is' $HOME\n", "deep/down/b.txt": "b"}
    report = await run(gateway, running, {"directory": "seed", "files": files}, task={"q": "why?"})
    assert report.log_tail == "./a.txt\n./deep/down/b.txt\nwhy? 'as it is' $HOME\n"


async def test_files_do_not_follow_a_seeds_links_out(gateway: FakeGateway, running: Running, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "way").symlink_to(outside)
    report = await run(gateway, running, {"directory": "seed", "files": {"way/x": "gotcha"}})
    assert report.outcome is Outcome.INFRA and "leads out of the workspace" in (report.reason or "")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("spec", [{"files": {"/x": ""}}, {"files": {"a/../../x": ""}}, {"git": "a", "tarball": "b"}])
def test_specs_that_make_no_sense_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        WorkspaceSpec.model_validate(spec)
