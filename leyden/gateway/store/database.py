"""One SQLite file in WAL mode: one writer with group commit, and reader threads that never block it.

Writes queue up; all that are waiting go into one transaction, each in its own savepoint, and are answered after the
commit has reached the disk (`synchronous=FULL`). So an answered write survives a kill or a power cut, and the cost of a
sync is shared by all who wait for it.

Transactions run in the writer's thread. One of quick writes only (a few rows) has its statements run on the event loop
and only its commit in the thread: each statement hands over the interpreter's lock, and beside a busy event loop a
dozen of those take longer than the statements themselves.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from leyden.errors import PreflightError
from leyden.gateway.errors import StoreUnavailable
from leyden.gateway.store.connection import Work
from leyden.gateway.store.ddl import MIGRATIONS

T = TypeVar("T")

MAX_QUEUED_WRITES = 20_000
MAX_GROUP = 256
"""Writes per transaction. More would lengthen the wait of the first without saving many syncs."""

BUSY_GROUP, GATHER_SECONDS = 4, 0.008
"""After a group of so many writes the next waits a moment for company: a commit costs the CPU of five calls."""

BUSY_SECONDS = 30
"""How long a write waits for another process that holds the file's lock, such as a person with a shell."""

_NO_SPACE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}


@dataclass(slots=True)
class _Write:
    work: Work[Any]
    quick: bool
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None


class SqliteConnection(sqlite3.Connection):
    """Implements leyden.gateway.store.connection.Connection. There is one writer and one gateway: nothing to lock."""

    FOR_UPDATE = ""
    SKIP_LOCKED = ""
    origin = ""
    shared = False

    def is_alive(self, origin: str) -> bool:
        return True

    def own(self, name: str) -> None:
        pass

    def try_own(self, name: str) -> bool:
        return True

    def share(self, name: str) -> None:
        pass

    def notify(self, *note: str) -> None:
        pass


class SqliteDatabase:
    """Implements leyden.gateway.store.connection.Database. Open with its path; `close` waits for queued writes."""

    shared = False

    def __init__(self, path: Path, *, readers: int = 2) -> None:
        self.path = path
        self._lock_file = _lock(path)
        self._local = threading.local()
        self._reader_connections: list[SqliteConnection] = []
        try:
            self._writer = _connect(path)
            _migrate(self._writer, path)
        except sqlite3.Error as e:
            raise PreflightError(f"can't open the store {path}: {e}; is the disk full or the file damaged?") from e
        self._pending: deque[_Write] = deque()
        self._using = threading.Lock()
        """Held by whoever uses the writer's connection, from the first statement of a group to its commit."""
        self._closed = False
        self._gathering = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leyden-store-writer")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="leyden-store-reader")

    async def write(self, work: Work[T], *, quick: bool = False) -> T:
        """Run `work` in the writer, durably. When it raises, nothing that it did is kept.

        `quick` says that it is a matter of microseconds.

        Raises:
            StoreUnavailable: the disk is full or failing, or writes come faster than the disk takes them.
        """
        if self._closed:
            raise StoreUnavailable("the gateway is shutting down and takes no more writes", status=503)
        if len(self._pending) >= MAX_QUEUED_WRITES:
            raise StoreUnavailable(
                f"the store is {MAX_QUEUED_WRITES} writes behind and can't take another; try again later", status=503
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._pending.append(_Write(work, quick, future))
        if len(self._pending) == 1:
            loop.call_soon(self._start, loop)
        # A caller that goes away must not undo what others may already rely on: the write goes on.
        return await asyncio.shield(future)

    async def read(self, work: Work[T]) -> T:
        """Run `work` on a reader connection, in one snapshot, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    async def settled(self) -> None:
        """Wait until every write that was queued before is done, so that a read that follows sees it."""
        await self.write(lambda _: None)

    async def notes(self) -> AsyncIterator[list[str]]:
        """There are no other gateways."""
        return
        yield []

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._using.acquire(timeout=BUSY_SECONDS):
            group = list(self._pending)
            self._pending.clear()
            self._commit(group)
            self._using.release()
        self._thread.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        for connection in self._reader_connections:
            connection.close()
        self._writer.close()
        os.close(self._lock_file)

    def _read(self, work: Work[T]) -> T:
        connection: SqliteConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = _connect(self.path)
            connection.execute("PRAGMA query_only = 1")
            self._local.connection = connection
            self._reader_connections.append(connection)
        connection.execute("BEGIN")
        try:
            return work(connection)
        finally:
            connection.execute("COMMIT")

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a group of what is waiting, unless one is under way: its end begins the next."""
        if self._gathering or not self._pending or not self._using.acquire(blocking=False):
            return
        group = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_GROUP))]
        begun = all(item.quick for item in group) and self._begin(wait=False)
        if begun:
            self._run(group)

        def finish() -> None:
            if begun:
                self._end(group)
            else:
                self._commit(group)
            self._using.release()
            with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                loop.call_soon_threadsafe(self._finished, loop, group)

        try:
            self._thread.submit(finish)
        except RuntimeError:  # Closed meanwhile.
            finish()

    def _finished(self, loop: asyncio.AbstractEventLoop, group: list[_Write]) -> None:
        _answer(group)
        if len(group) < BUSY_GROUP:
            self._start(loop)
            return
        self._gathering = True
        loop.call_later(GATHER_SECONDS, self._gathered, loop)

    def _gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        self._gathering = False
        self._start(loop)

    def _commit(self, group: list[_Write]) -> None:
        """A whole transaction."""
        try:
            self._begin(wait=True)
        except sqlite3.Error as e:
            _fail(group, _explain(e, self.path))
            return
        self._run(group)
        self._end(group)

    def _begin(self, *, wait: bool) -> bool:
        """Begin a transaction; False when another process holds the lock and `wait` is False."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                return True
            except sqlite3.OperationalError as e:
                if (e.sqlite_errorcode & 0xFF) != sqlite3.SQLITE_BUSY or (wait and time.monotonic() > deadline):
                    if wait:
                        raise
                    return False
                if not wait:
                    return False
                time.sleep(0.01)

    def _run(self, group: list[_Write]) -> None:
        """Run the writes of a group. Those that raise are undone alone: only then each gets a savepoint of its own."""
        db = self._writer
        try:
            for item in group:
                item.result = item.work(db)
            return
        except BaseException as e:
            if not db.in_transaction:
                group[0].error = _explain(e, self.path)
                return  # SQLite gave up the whole transaction, as it may when the disk is full; `_end` tells.
            db.execute("ROLLBACK")
            self._begin(wait=True)
        for item in group:
            if not db.in_transaction:
                return  # SQLite gave up the whole transaction, as it may when the disk is full; `_end` tells.
            try:
                db.execute("SAVEPOINT one")
                item.result = item.work(db)
                db.execute("RELEASE one")
            except BaseException as e:
                item.error = _explain(e, self.path)
                if db.in_transaction:
                    db.execute("ROLLBACK TO one")
                    db.execute("RELEASE one")

    def _end(self, group: list[_Write]) -> None:
        """Bring a group to the disk, or undo it whole."""
        db = self._writer
        if not db.in_transaction:
            first = next((item.error for item in group if item.error is not None), None)
            _fail(group, first or StoreUnavailable(f"the store gave up a transaction on {self.path.name}"))
            return
        try:
            db.execute("COMMIT")
        except BaseException as e:
            if db.in_transaction:
                db.execute("ROLLBACK")
            _fail(group, _explain(e, self.path))


def _fail(group: list[_Write], error: BaseException) -> None:
    for item in group:
        item.error = item.error or error


def _answer(group: list[_Write]) -> None:
    """Resolve the futures of a group."""
    for item in group:
        if item.future.done():
            continue
        if item.error is not None:
            item.future.set_exception(item.error)
            item.future.exception()  # Read once, so that an abandoned write isn't reported as never retrieved.
        else:
            item.future.set_result(item.result)


def _explain(error: BaseException, path: Path) -> BaseException:
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(error, sqlite3.Error) and isinstance(code, int) and (code & 0xFF) in _NO_SPACE:
        return StoreUnavailable(
            f"the store can't write to {path.name}: {error}; nothing of this request was kept; "
            "free some disk space and try again"
        )
    return error


def _connect(path: Path) -> SqliteConnection:
    connection = sqlite3.connect(
        path, factory=SqliteConnection, isolation_level=None, check_same_thread=False, timeout=0
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cache_size = -4000")
    return connection


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    db.execute("CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY, applied_at REAL NOT NULL)")
    done = db.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()[0]
    if done > len(MIGRATIONS):
        raise PreflightError(
            f"the store {path} was written by a newer Leyden (schema {done}, this one knows {len(MIGRATIONS)}); upgrade"
        )
    for version, script in enumerate(MIGRATIONS[done:], start=done + 1):
        db.executescript(f"BEGIN IMMEDIATE;{script};INSERT INTO migrations VALUES ({version}, {time.time()});COMMIT;")


def _lock(path: Path) -> int:
    """Hold `path`.lock for this process: two gateways on one store would each believe the other's attempts unknown."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise PreflightError(f"can't write the store {path}: {e.strerror}") from e
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise PreflightError(
            f"the store {path} is in use by another gateway; stop it or choose another store"
        ) from None
    return handle
