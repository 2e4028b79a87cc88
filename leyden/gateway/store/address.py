"""Where a store is: a SQLite file, or the URL of a PostgreSQL database."""

from __future__ import annotations

import re
from pathlib import Path

StoreAddress = Path | str


def is_postgres(address: StoreAddress) -> bool:
    return isinstance(address, str) and address.startswith(("postgresql://", "postgres://"))


def shown(address: StoreAddress) -> str:
    """The address without the password that a URL may hold."""
    return re.sub(r"//([^:@/]*):[^@/]*@", r"//\1:***@", str(address)) if is_postgres(address) else str(address)
