"""A store URL, taken apart. No I/O: a wrong one is found before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

SCHEMES = "redis://, rediss://, redis+sentinel://, redis+cluster://, unix://, embedded:// or memory://"

_DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True, slots=True)
class StoreUrl:
    scheme: str
    """``redis``, ``rediss`` (TLS), ``unix``, ``embedded`` or ``memory``."""
    discovery: str = ""
    """``sentinel``, ``cluster``, or empty for one server at a fixed address."""
    username: str | None = None
    password: str | None = None
    nodes: tuple[tuple[str, int], ...] = ()
    master: str = ""
    db: int = 0
    path: str = ""
    """Of a Unix socket."""
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def of_one_process(self) -> bool:
        """No other process can join such a store."""
        return self.scheme == "memory" or (self.scheme == "embedded" and not self.path)


def parse_store_url(url: str) -> StoreUrl:
    """The parts of a store URL.

    Raises:
        ValueError: it is none; the message repeats nothing that may be a password.
    """
    parts = urlsplit(url)
    scheme, _, discovery = parts.scheme.partition("+")
    if "://" not in url:
        raise ValueError(f"not a URL; use {SCHEMES}")
    query = dict(parse_qsl(parts.query))
    if not discovery and scheme in ("memory", "embedded", "unix"):
        path = unquote(parts.path)
        if scheme == "unix" and not path:
            raise ValueError("the path of the socket is missing: unix:///PATH")
        username, password = _credentials(parts)
        db = _database(query.get("db", "0"))
        return StoreUrl(scheme, username=username, password=password, db=db, path=path, query=query)
    if scheme not in ("redis", "rediss") or discovery not in ("", "sentinel", "cluster"):
        raise ValueError(f"unknown scheme {parts.scheme!r}; use {SCHEMES}")
    segments = [segment for segment in parts.path.split("/") if segment]
    master = ""
    if discovery == "sentinel":
        if not segments:
            raise ValueError("the name of the master is missing: redis+sentinel://host:26379/MASTER/0")
        master = segments.pop(0)
    username, password = _credentials(parts)
    return StoreUrl(
        scheme,
        discovery,
        username,
        password,
        nodes=_nodes(parts.netloc.rpartition("@")[2], _DEFAULT_PORTS[discovery or scheme]),
        master=master,
        db=_database(segments[0]) if segments and discovery != "cluster" else 0,
        query=query,
    )


def _credentials(parts: SplitResult) -> tuple[str | None, str | None]:
    username, password = parts.username, parts.password
    return unquote(username) if username else None, unquote(password) if password else None


def _database(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("the database is not a number: redis://host:6379/0")
    return int(text)


def _nodes(netloc: str, default_port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for part in netloc.split(","):
        one = urlsplit(f"//{part}")
        try:
            port = one.port
        except ValueError:
            raise ValueError(
                "the port is not a number up to 65535; special characters of a password must be percent-encoded"
            ) from None
        nodes.append((one.hostname or "127.0.0.1", port or default_port))
    return tuple(nodes)
