"""Logs on their way to the gateway: what attempts print is sent once a second, and whole after their end.

The files stay here. A gateway that can't be reached is told later; one that refuses a log isn't asked again. Nothing
waits for an upload: neither an agent nor the report of its outcome.
"""

from __future__ import annotations

import asyncio
import base64
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from leyden.client import LeydenClient
from leyden.errors import GatewayError
from leyden.schema import LogPart, LogPiece

EVERY = 1.0
"""Seconds between two looks at the logs."""
PIECE_BYTES = 256 * 1024

_log = structlog.get_logger()


@dataclass(slots=True)
class _File:
    rollout_id: str
    attempt_id: str
    part: LogPart
    path: Path
    sent: int = 0
    final: bool = False


class Uploads:
    """The logs of a controller's attempts, while there is something of them to send."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._some = asyncio.Event()

    def opened(self, rollout_id: str, attempt_id: str, part: LogPart, path: Path) -> None:
        """A log that grows from now on."""
        self._files[path] = _File(rollout_id, attempt_id, part, path)
        self._some.set()

    def closed(self, path: Path) -> None:
        """The log has its last byte. One without any isn't sent."""
        file = self._files.get(path)
        if file is None:
            return
        file.final = True
        if file.sent == 0 and _size(path) == 0:
            del self._files[path]

    async def run(self, client: LeydenClient, controller_id: str) -> None:
        """Send what is new, until cancelled."""
        while True:
            if not self._files:
                self._some.clear()
            await self._some.wait()
            await asyncio.sleep(EVERY)
            await self.send(client, controller_id)

    async def send(self, client: LeydenClient, controller_id: str) -> None:
        """Send what is there now."""
        for file in list(self._files.values()):
            try:
                while await self._piece(file, client, controller_id):
                    pass
            except GatewayError as e:
                if not 0 < e.status < 500:
                    # Down or restarting: so it is for the others.
                    _log.warning("can't send logs, trying again", why=str(e))
                    return
                if e.status != 404:
                    _log.warning("the gateway refused a log", rollout=file.rollout_id, why=str(e))
                self._drop(file)
            except OSError as e:
                _log.warning("can't read a log", rollout=file.rollout_id, why=str(e))
                self._drop(file)

    async def _piece(self, file: _File, client: LeydenClient, controller_id: str) -> bool:
        """Send one piece; False when nothing more is there to be sent."""
        # Asked before the file is read: what is written between the two is found by the next look.
        final = file.final
        data = _read(file.path, file.sent)
        last = final and file.sent + len(data) >= _size(file.path)
        if not data and not last:
            return False
        piece = LogPiece(
            controller_id=controller_id, part=file.part, start=file.sent, data=base64.b64encode(data), last=last
        )
        await client.append_log(file.rollout_id, file.attempt_id, piece)
        file.sent += len(data)
        if last:
            self._drop(file)
        return not last

    def _drop(self, file: _File) -> None:
        if self._files.get(file.path) is file:
            del self._files[file.path]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(handle, PIECE_BYTES, start)
    finally:
        os.close(handle)
