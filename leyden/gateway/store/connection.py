"""What the SQL modules need of a database connection, so that each statement exists once for SQLite and PostgreSQL.

Statements use `?` for parameters and only what both databases understand. Rows are read by name or by position.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Row(Protocol):
    def __getitem__(self, key: Any, /) -> Any: ...


class Cursor(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """A connection inside a transaction. The lock methods are for databases with several writers."""

    @property
    def FOR_UPDATE(self) -> str:
        """Ends a SELECT whose rows nobody else may change before this transaction ends."""
        ...

    @property
    def SKIP_LOCKED(self) -> str:
        """The same, leaving out rows that somebody else is changing."""
        ...

    @property
    def origin(self) -> str:
        """The gateway whose connection this is."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other gateways may use the database at the same time."""
        ...

    def is_alive(self, origin: str) -> bool:
        """Whether that gateway still runs, as far as the database can tell."""
        ...

    def execute(self, sql: str, params: Sequence[Any] = (), /) -> Cursor: ...
    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any: ...

    def own(self, name: str) -> None:
        """Hold the lock `name` alone until the transaction ends."""
        ...

    def try_own(self, name: str) -> bool:
        """The same without waiting; False when somebody else holds it."""
        ...

    def share(self, name: str) -> None:
        """Hold the lock `name` together with others who share it."""
        ...

    def notify(self, *note: str) -> None:
        """Tell other gateways, once the transaction is committed."""
        ...


Work = Callable[[Connection], T]


class Database(Protocol):
    """Runs transactions off the event loop."""

    shared: bool
    """Whether other gateways may use it at the same time."""

    async def write(self, work: Work[T], *, quick: bool = False) -> T:
        """Run `work` in a transaction of its own, durably. When it raises, nothing that it did is kept.

        `quick` says that it is a matter of microseconds.

        Raises:
            StoreUnavailable: the database can't write, or writes come faster than it takes them.
        """
        ...

    async def read(self, work: Work[T]) -> T:
        """Run `work` in one snapshot."""
        ...

    async def settled(self) -> None:
        """Wait until every write that was queued before is done, so that a read that follows sees it."""
        ...

    def notes(self) -> AsyncIterator[list[str]]:
        """What other gateways `notify`; [] when some may have been missed."""
        ...

    def close(self) -> None: ...
