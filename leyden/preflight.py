"""What a run needs, checked before anything starts, so that a missing piece is one sentence and not a stack of logs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import struct
from pathlib import Path

import psutil

from leyden.config import RunConfig
from leyden.errors import PreflightError

CHECKPOINT_MARGIN = 64_000_000
"""Bytes asked for beside a checkpoint's weights and moments: tokenizer, record, store, logs."""

_ACTIVATIONS = 1.5e9
"""Bytes allowed for one micro-batch's activations and the processes' own code."""


def check_output(run_dir: Path, parameters: int, keep_checkpoints: int) -> None:
    """The run's folder can be written and has room for its checkpoints.

    Raises:
        PreflightError: naming the folder and what is missing.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".probe"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as e:
        raise PreflightError(f"can't write the run's folder {run_dir}: {e.strerror}") from e
    # A checkpoint is the weights and AdamW's two moments; one more is written before an old one goes, and one weights
    # file is on its way to the engine.
    needed = parameters * 4 * (3 * (keep_checkpoints + 1) + 2) + CHECKPOINT_MARGIN
    have = shutil.disk_usage(run_dir).free + sum(f.stat().st_size for f in run_dir.rglob("*") if f.is_file())
    if have < needed:
        raise PreflightError(
            f"the disk of {run_dir} has {size(have)} for this run, its checkpoints need {size(needed)}: "
            "free some, lower training.keep_checkpoints, or set output_dir to another disk"
        )


def check_memory(config: RunConfig, parameters: int) -> None:
    """Model, gradients, optimizer and engine fit into free memory.

    Raises:
        PreflightError: with what is needed and what is free.
    """
    weights = parameters * 4
    # Trainer: weights, gradients, two moments (LoRA: next to nothing for the last three). Engine: weights and a
    # repacked copy. KV cache: the engine sizes its own from what is left.
    trainer = weights * (4 if config.training.lora is None else 1.2)
    needed = trainer + 2 * weights + _ACTIVATIONS
    free = free_memory()
    if free < needed:
        lora = "" if config.training.lora else ", train with LoRA (training.lora.rank=16)"
        raise PreflightError(
            f"model {config.model!r} ({parameters / 1e6:.0f} M parameters) needs about {size(needed)} of memory "
            f"to train and serve, {size(free)} is free: close other programs{lora}, or use a smaller model"
        )


def size(n: float) -> str:
    """Bytes for people."""
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


def free_memory() -> int:
    """Bytes that a new process could use: what the machine has free, or less where a limit is set (control group,
    `ulimit -v`)."""
    free = psutil.virtual_memory().available
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return max(free, 0)


def count_parameters(folder: Path) -> int:
    """Number of weights in a model folder's safetensors files, from their headers alone.

    Raises:
        PreflightError: when there are none, or one can't be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PreflightError(f"model folder {folder} has no *.safetensors weights")
    total = 0
    for file in files:
        try:
            with file.open("rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                header = json.loads(f.read(length))
        except (OSError, struct.error, ValueError, MemoryError, OverflowError) as e:
            raise PreflightError(f"{file} isn't a readable safetensors file: fetch it again") from e
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for n in tensor["shape"]:
                    size *= n
                total += size
    return total


def pick_port(host: str, port: int, what: str) -> int:
    """`port` when it is free on `host`, or a free one for 0.

    Raises:
        PreflightError: naming the port when it is in use or may not be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise PreflightError(
                f"{what} can't listen on {host}:{port}: {os.strerror(e.errno or 0).lower()}; "
                f"end what uses it, or choose another with {what}.port=… (0 picks a free one)"
            ) from e
        return s.getsockname()[1]
