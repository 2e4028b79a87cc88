"""Logs of attempts: bounded on disk and in memory, and never a reason for an agent to block."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

TAIL_BYTES = 4096
"""Of the log's end, sent with an attempt's outcome."""

_KEPT_TAIL = 128 * 1024
"""Most of a log's end held in memory until it is closed, so that memory stays small with a thousand agents."""

_CHUNK = 64 * 1024
_CHUNKS_PER_TURN = 4


def file_name(text: str) -> str:
    """`text` as one file name that can't leave its folder."""
    name = quote(text, safe=":")
    return name if not name.startswith(".") else "%2E" + name[1:]


def log_path(logs_dir: Path, rollout_id: str, attempt_id: str) -> Path:
    """Where the controller keeps the log of an attempt's agent. The grader's lies beside it as `….grader.log`."""
    return logs_dir / file_name(rollout_id) / f"{file_name(attempt_id)}.log"


class BoundedLog:
    """A file of at most about `limit` bytes: the head as it comes, the tail at `close`, and a line for what was cut.

    A full disk loses log lines, never the attempt.
    """

    def __init__(self, path: Path, limit: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._tail_limit = min(limit // 2, _KEPT_TAIL)
        self._head_left = limit - self._tail_limit
        self._tail = bytearray()
        self._cut = 0
        self._recent = b""

    def write(self, data: bytes) -> None:
        self._recent = (self._recent + data)[-2 * TAIL_BYTES :]
        if self._head_left:
            head = data[: self._head_left]
            self._head_left -= len(head)
            self._put(head)
            data = data[len(head) :]
        self._tail += data
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            self._cut += excess
            del self._tail[:excess]

    def close(self) -> None:
        if self._cut:
            self._put(f"\n[… {self._cut} bytes left out here …]\n".encode())
        self._put(bytes(self._tail))
        self._tail.clear()
        self._file.close()

    def tail(self) -> str:
        """The last `TAIL_BYTES` or fewer, from the start of a character."""
        recent = self._recent[-TAIL_BYTES:]
        if len(self._recent) > TAIL_BYTES:
            # A cut inside a UTF-8 character leaves up to three continuation bytes in front.
            start = next((i for i, byte in enumerate(recent[:4]) if byte & 0xC0 != 0x80), 0)
            recent = recent[start:]
        return recent.decode("utf-8", "replace").replace("\0", "\ufffd")

    def last_line(self) -> str:
        return last_line(self._recent)

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError:
            pass


class LastLine:
    """Remembers the end of a stream, for its last line."""

    def __init__(self, limit: int = 64 * 1024) -> None:
        self._limit = limit
        self._recent = b""

    def write(self, data: bytes) -> None:
        self._recent = (self._recent + data)[-self._limit :]

    def text(self) -> str:
        return last_line(self._recent)


def last_line(data: bytes) -> str:
    """The last line that isn't blank, without the space around it; '' when there is none."""
    lines = data.decode("utf-8", "replace").replace("\0", "\ufffd").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Pump:
    """Reads a pipe as it fills and hands the bytes to `sink`, in the event loop."""

    def __init__(self, sink: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._read, self.write_end = os.pipe()
        self._writable = True
        os.set_blocking(self._read, False)
        self._loop.add_reader(self._read, self._on_readable)
        self._reading = True

    def close_write_end(self) -> None:
        """Call once the child has it."""
        if self._writable:
            os.close(self.write_end)
            self._writable = False

    def close(self) -> None:
        """Take what is still in the pipe, then let go of it, whoever may hold the other end."""
        self.close_write_end()
        # A pipe's buffer is bounded: so is this loop, also with a writer that never ends.
        for _ in range(64):
            if not self._reading or not self._take():
                break
        self._stop_reading()
        os.close(self._read)

    def _on_readable(self) -> None:
        for _ in range(_CHUNKS_PER_TURN):
            if not self._take():
                break

    def _take(self) -> bool:
        try:
            data = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._stop_reading()
            return False
        self._sink(data)
        return True

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._read)
