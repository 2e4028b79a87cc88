"""The processes of a fault run: an engine, and gateways that are killed and started again on the same port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

ADMIN = "admin-key-of-the-fault-run"
START_SECONDS = 30


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Engine:
    """Answers until `stop`."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.log = folder / "engine.jsonl"
        ready = folder / "engine.ready"
        command = [sys.executable, "-m", "tests.faults.engine", str(model), str(self.log), str(ready)]
        self._process = subprocess.Popen(command, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists() or not ready.read_text():
            assert self._process.poll() is None and time.monotonic() < deadline, "the engine didn't start"
            time.sleep(0.02)
        self.endpoint = ready.read_text()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class GatewayProcess:
    """`leyden gateway` as a user starts it."""

    def __init__(self, store: str, model: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._command = [sys.executable, "-m", "leyden", "gateway", "--store", store, "--model", str(model)]
        self._command += ["--port", str(port), "--served-model-name", "tiny"]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env={**os.environ, "LEYDEN_ADMIN_KEY": ADMIN}
            )

    def kill(self) -> None:
        """SIGKILL. Raises when it had ended by itself."""
        assert self._process is not None
        assert self._process.poll() is None, f"the gateway ended by itself: {self._last_words()}"
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    async def ready(self, http: aiohttp.ClientSession) -> None:
        """Wait until it answers /healthz with 200."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                async with http.get(f"{self.url}/healthz") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            assert self._process is not None and self._process.poll() is None, f"no start: {self._last_words()}"
            assert time.monotonic() < deadline, f"no answer within {START_SECONDS} s: {self._last_words()}"
            await asyncio.sleep(0.01)

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
