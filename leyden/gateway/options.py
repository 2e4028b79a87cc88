"""What a gateway is started with, checked before anything else happens."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from leyden.errors import PreflightError
from leyden.gateway.store.address import StoreAddress, is_postgres

ADMIN_KEY_VARIABLE = "LEYDEN_ADMIN_KEY"
ENGINE_KEY_VARIABLE = "LEYDEN_ENGINE_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """`admin_key` None takes LEYDEN_ADMIN_KEY, else a key file: beside a SQLite store, in the working directory with a
    PostgreSQL one. `port` 0 picks a free one."""

    store: StoreAddress
    model_folder: Path
    model_name: str
    host: str = "127.0.0.1"
    port: int = 0
    admin_key: str | None = None
    engine_key: str | None = None
    request_timeout_seconds: float = 600
    keepalive_seconds: float = 10
    replay_grace_seconds: float = 10
    retention_days: float | None = None
    """How long ended rollouts are kept, and untouched ones waited for. None: for ever."""
    ready_file: Path | None = None
    """Written as JSON {"url", "pid"} once the gateway answers; how a starter learns the port."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _nonblank(value: str | None) -> str | None:
    return value.strip() if value and value.strip() else None


def admin_key(options: GatewayOptions) -> tuple[str, Path | None]:
    """The admin key, and the key file when this start made one.

    Raises:
        PreflightError: the host can be reached from elsewhere and no key was given, or the key file can't be used.
    """
    given = _nonblank(options.admin_key) or _nonblank(os.environ.get(ADMIN_KEY_VARIABLE))
    if given is not None:
        return given, None
    if not is_loopback(options.host):
        raise PreflightError(
            f"host {options.host} can be reached from other machines, so an admin key must be given: set "
            f"{ADMIN_KEY_VARIABLE}, or bind to 127.0.0.1"
        )
    path = Path("leyden-gateway.key") if is_postgres(options.store) else Path(f"{options.store}.key")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = _nonblank(path.read_text())
            if kept is not None:
                return kept, None
        key = f"ley-admin-{secrets.token_urlsafe(32)}"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as file:
            os.fchmod(handle, 0o600)
            file.write(key + "\n")
    except OSError as e:
        raise PreflightError(f"can't use the key file {path}: {e.strerror}") from e
    return key, path


def engine_key(options: GatewayOptions) -> str | None:
    return _nonblank(options.engine_key) or _nonblank(os.environ.get(ENGINE_KEY_VARIABLE))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        PreflightError: the address can't be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as e:
        raise PreflightError(f"host {host!r} is no address of this machine: {e.strerror}") from e
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as e:
        listener.close()
        raise PreflightError(f"can't listen on {host}:{port}: {e.strerror}; stop what uses it or take another") from e
    listener.setblocking(False)
    return listener
