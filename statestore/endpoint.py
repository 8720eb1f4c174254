"""Where one server listens and how to greet it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server's address and credentials."""

    host: str = "127.0.0.1"
    port: int = 6379
    unix_path: str | None = None
    username: str | None = None
    password: str | None = None
    db: int = 0
    tls: ssl.SSLContext | None = None
    credentials: str = "user or password"
    """What the store's URL calls them."""

    def __str__(self) -> str:
        return self.unix_path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")

    def greeting(self) -> Iterator[tuple[str | int, ...]]:
        """The commands that come first on a new connection."""
        if self.password is not None:
            yield ("AUTH", self.username, self.password) if self.username is not None else ("AUTH", self.password)
        if self.db:
            yield ("SELECT", self.db)
        yield ("CLIENT", "SETNAME", "dualmap")
