"""The engine as a process: options, start-up checks, HTTP server, end.

`python -m leyden.training.torch.server --model DIR` or `run_engine(options)`. Torch is imported inside, after the
environment that its thread pool reads at start has been set.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn

from leyden.errors import ConfigError, LeydenError, PreflightError

KEY_VARIABLE = "LEYDEN_ENGINE_KEY"
_DEAD_GRACE = 2.0
"""Seconds for which a dead engine still answers, so that clients and probes learn why."""
_SWITCH_INTERVAL = 0.0005
"""The engine's thread takes the interpreter lock back after each of hundreds of operations a step; at Python's default
of 5 ms one busy HTTP request would stretch a step several times."""


@dataclass(frozen=True)
class EngineOptions:
    """How to run an engine. None means: all cores, the model's own length (at most 8192), KV cache from free memory.

    `port` 0 takes a free one. The key comes from the environment (`LEYDEN_ENGINE_KEY`) unless given.
    """

    model: str
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    threads: int | None = None
    max_batch: int = 64
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    device: str = "auto"
    version: int = 0
    max_waiting: int = 4096
    request_timeout_seconds: float = 3600
    key: str | None = None


def run_engine(options: EngineOptions) -> int:
    """Serve until SIGTERM or SIGINT (returns 0), or until the engine fails (returns 1).

    Raises:
        PreflightError: when the model, its memory or the port isn't to be had.
        ConfigError: when the options contradict each other.
    """
    _configure_log()
    log = structlog.get_logger("engine")
    key = options.key or os.environ.get(KEY_VARIABLE) or None
    check_options(options, key)
    _quiet_threads()
    with contextlib.closing(bind(options.host, options.port)) as sock:
        return asyncio.run(_serve(options, key, sock, log))


def check_options(options: EngineOptions, key: str | None) -> None:
    """Raise ConfigError for options that can't be right."""
    if key is None and not is_loopback(options.host):
        raise ConfigError(
            f"the engine refuses to listen on {options.host} without a key: set {KEY_VARIABLE}, or use host 127.0.0.1"
        )
    for name in ("threads", "max_batch", "max_model_len", "kv_cache_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, it must be at least 1")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        PreflightError: when the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as e:
        sock.close()
        raise PreflightError(f"port {port} on {host} can't be had ({e.strerror}): choose another port") from e
    return sock


async def _serve(options: EngineOptions, key: str | None, sock: socket.socket, log: structlog.BoundLogger) -> int:
    import torch

    from leyden.training.torch.api import EngineApi
    from leyden.training.torch.engine import Engine
    from leyden.training.torch.kv import BLOCK
    from leyden.training.torch.loading import decoder_of, load_model, pick_device

    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    model = load_model(
        Path(options.model),
        device=pick_device(options.device),
        max_batch=options.max_batch,
        max_model_len=options.max_model_len,
        kv_cache_tokens=options.kv_cache_tokens,
    )
    loop = asyncio.get_running_loop()
    died = asyncio.Event()
    engine = Engine(
        model.runner,
        n_blocks=model.sizes.kv_tokens // BLOCK,
        max_batch=options.max_batch,
        max_waiting=options.max_waiting,
        version=options.version,
        decode=decoder_of(model.tokenizer),
        on_death=lambda sentence: loop.call_soon_threadsafe(died.set) and None,
    )
    name = options.served_model_name or Path(options.model).name
    api = EngineApi(engine, model, name, key, options.request_timeout_seconds)
    server = _Server(
        uvicorn.Config(
            api.app(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=10, backlog=1024
        ),
        engine.abort_all,
    )
    engine.start()
    host, port = sock.getsockname()[:2]
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    log.info(
        "engine ready",
        url=f"http://{f'[{host}]' if ':' in host else host}:{port}/v1",
        model=name,
        fast_decoder=model.fast,
        largest_logit_difference=model.error,
        threads=threads,
        max_batch=options.max_batch,
        max_model_len=model.sizes.max_model_len,
        kv_cache_tokens=model.sizes.kv_tokens,
    )
    dying = asyncio.ensure_future(died.wait())
    await asyncio.wait((serving, dying), return_when=asyncio.FIRST_COMPLETED)
    if died.is_set():
        log.error("engine failed", reason=engine.failure)
        await asyncio.sleep(_DEAD_GRACE)
        server.should_exit = True
    await serving
    dying.cancel()
    await asyncio.to_thread(engine.stop, 10)
    log.info("engine stopped", **engine.stats())
    return 1 if engine.failure else 0


class _Server(uvicorn.Server):
    """Uvicorn whose first SIGTERM or SIGINT aborts what runs, so that clients get what they have, then ends cleanly."""

    def __init__(self, config: uvicorn.Config, abort_all: object) -> None:
        super().__init__(config)
        self._abort_all = abort_all

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own raises the signal again at the end, which would turn a clean stop into a death by signal.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        with contextlib.suppress(LeydenError):
            if callable(self._abort_all):
                self._abort_all()


def _quiet_threads() -> None:
    """Keep idle worker threads from spinning: agents share the cores. Read once, when torch's OpenMP starts."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _configure_log() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def parse_options(arguments: list[str] | None = None) -> EngineOptions:
    """Command-line arguments as options."""
    parser = argparse.ArgumentParser(prog="leyden-engine", description="Serve a model, token ids in, token ids out.")
    parser.add_argument("--model", required=True, help="Hugging Face model folder")
    parser.add_argument("--served-model-name", help="default: the folder's name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, help="default: the model's own, at most 8192")
    parser.add_argument("--kv-cache-tokens", type=int, help="default: from free memory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--version", type=int, default=0, help="policy version of the weights at start")
    return EngineOptions(**vars(parser.parse_args(arguments)))


def main(arguments: list[str] | None = None) -> int:
    try:
        return run_engine(parse_options(arguments))
    except LeydenError as e:
        print(f"leyden engine: {e}", file=sys.stderr)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
