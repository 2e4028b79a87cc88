"""Checkpoints on disk: all or nothing, the newest few kept.

`checkpoints/step-00012/` holds what resuming after 12 steps needs. It is also a whole Hugging Face folder
(`config.json`, tokenizer files, `model.safetensors` with LoRA merged in) that `AutoModelForCausalLM.from_pretrained`
loads: the last checkpoint is the run's export. A checkpoint is written to a temporary folder, synced and renamed; only
folders with the `complete` marker count, so a kill at any point leaves the previous one in use.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from leyden.config import RunConfig
from leyden.errors import RunError

MARKER = "complete"
STATE = "leyden.json"
_NAME = re.compile(r"^step-(\d{5,})$")


@dataclass(frozen=True)
class CheckpointState:
    """`step` steps are done; `version` is the policy version of the weights.

    Data order needs no more than step and seed (tasks.TaskOrder); `config_hash` tells whether the run file changed.
    """

    step: int
    version: int
    seed: int
    config_hash: str
    run: str


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: CheckpointState


def config_hash(config: RunConfig) -> str:
    """Hash of what decides the numbers of a run. How long it runs, how it's served and watched may change on resume."""
    data = config.model_dump(mode="json", exclude={"output_dir", "engine", "gateway", "controller", "validation"})
    for key in ("steps", "checkpoint_every", "keep_checkpoints", "stuck_after_seconds", "threads", "max_infra_share"):
        data["training"].pop(key)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    found = []
    root = run_dir / "checkpoints"
    for folder in root.iterdir() if root.is_dir() else []:
        if _NAME.match(folder.name) and (folder / MARKER).exists():
            found.append(Checkpoint(folder, CheckpointState(**json.loads((folder / STATE).read_text()))))
    return sorted(found, key=lambda c: c.state.step)


def latest(run_dir: Path) -> Checkpoint | None:
    found = checkpoints(run_dir)
    return found[-1] if found else None


def save_checkpoint(
    run_dir: Path, state: CheckpointState, write: Callable[[Path], None], *, keep: int, needed_bytes: int
) -> Path:
    """Write a checkpoint with `write(folder)`, then delete all but the newest `keep`. Returns its folder.

    Raises:
        RunError: the disk is full; earlier checkpoints are as they were.
    """
    root = run_dir / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob("tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    require_space(root, needed_bytes, "a checkpoint")
    final = root / f"step-{state.step:05d}"
    temporary = root / f"tmp-{state.step:05d}-{os.getpid()}"
    try:
        temporary.mkdir()
        write(temporary)
        (temporary / STATE).write_text(json.dumps(asdict(state)))
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        (temporary / MARKER).touch()
        _sync(temporary)
        if final.exists():
            # A replayed step: the marker goes first, so that a kill in between can't leave half a folder that counts.
            (final / MARKER).unlink(missing_ok=True)
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(root)
    except OSError as e:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _disk_error(e, root, needed_bytes, "a checkpoint") from e
    except BaseException as e:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors and torch report a full disk in exceptions of their own.
        if "No space left" in str(e) or "os error 28" in str(e) or free_bytes(root) < 1_000_000:
            raise _disk_error(OSError(errno.ENOSPC, "No space left"), root, needed_bytes, "a checkpoint") from e
        raise
    for old in checkpoints(run_dir)[:-keep]:
        (old.folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(old.folder, ignore_errors=True)
    return final


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse to start a write that can't fit.

    Raises:
        RunError: with what is needed, where, and what is free.
    """
    if (free := free_bytes(folder)) < needed:
        raise RunError(
            f"{what} needs about {_size(needed)} in {folder}, where {_size(free)} are free: "
            "make room and resume with --resume"
        )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader or a crash sees the old text or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_error(e: OSError, root: Path, needed: int, what: str) -> RunError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(
            f"the disk is full: {what} needs about {_size(needed)} in {root}, "
            f"where {_size(free_bytes(root))} are free; "
            "make room and resume with --resume"
        )
    return RunError(f"can't write {what} in {root}: {e.strerror or e}")


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
