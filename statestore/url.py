"""A store URL, taken apart. No I/O: a wrong one is found before anything is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

SCHEMES = "redis://, rediss://, redis+sentinel://, redis+cluster://, unix://, embedded:// or memory://"

_DEFAULT_PORTS = {"redis": 6379, "rediss": 6379, "sentinel": 26379, "cluster": 6379}
_TLS_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ssl_ca_certs": (),
    "ssl_certfile": (),
    "ssl_keyfile": (),
    "ssl_cert_reqs": ("required", "none"),
    "ssl_check_hostname": ("true", "false"),
}
"""What each may be; empty for anything. The names are redis-py's."""
_SENTINEL_OPTIONS: Mapping[str, tuple[str, ...]] = {"sentinel_username": (), "sentinel_password": ()}
_OPTION_NAME = re.compile(r"[a-z_]{1,32}")
_SECRET_OPTION = re.compile(r"(?<=[?&])([^=&]*(?:user|pass)[^=&]*=)[^&]*", re.IGNORECASE)


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
    options: Mapping[str, str] = field(default_factory=dict)
    """What follows the question mark: only options that this scheme has, with values that they may have."""

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
    if not discovery and scheme in ("memory", "embedded", "unix"):
        return _local(scheme, parts)
    if scheme not in ("redis", "rediss") or discovery not in ("", "sentinel", "cluster"):
        raise ValueError(f"unknown scheme {parts.scheme!r}; use {SCHEMES}")
    # First: a password that is not percent-encoded is told of as such, wherever its parts end up.
    nodes = _nodes(parts.netloc.rpartition("@")[2], _DEFAULT_PORTS[discovery or scheme])
    if parts.fragment:
        raise ValueError("a '#' must be percent-encoded: %23")
    segments = [unquote(segment) for segment in parts.path.split("/") if segment]
    master = ""
    if discovery == "sentinel":
        if not segments:
            raise ValueError("the name of the master is missing: redis+sentinel://host:26379/MASTER/0")
        master = segments.pop(0)
    db = _database(segments[0]) if segments else 0
    if discovery == "cluster" and db:
        raise ValueError("a cluster has database 0 alone: redis+cluster://host:6379")
    username, password = _credentials(parts)
    options = _options(parts.query, _known_options(scheme, discovery))
    if "sentinel_username" in options and "sentinel_password" not in options:
        raise ValueError("sentinel_username without sentinel_password; a user without one takes any")
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise ValueError("ssl_keyfile without ssl_certfile")
    return StoreUrl(scheme, discovery, username, password, nodes, master, db, options=options)


def without_password(url: str) -> str:
    """A store URL as it may be shown: users and passwords hidden, those of its options too."""
    credentials, at, rest = url.rpartition("@")
    shown = f"{credentials.partition('://')[0]}://***:***@{rest}" if at else url
    return _SECRET_OPTION.sub(r"\1***", shown)


def _local(scheme: str, parts: SplitResult) -> StoreUrl:
    path = unquote(parts.path)
    if scheme == "unix" and not path:
        raise ValueError("the path of the socket is missing: unix:///PATH")
    username, password = _credentials(parts)
    options = _options(parts.query, {"db": ()} if scheme == "unix" else {})
    db = _database(options.get("db", "0"))
    return StoreUrl(scheme, username=username, password=password, db=db, path=path, options=options)


def _credentials(parts: SplitResult) -> tuple[str | None, str | None]:
    username, password = parts.username, parts.password
    if username and not password:
        raise ValueError("a user without a password: use USER:PASSWORD@ or, where there is no user, :PASSWORD@")
    return unquote(username) if username else None, unquote(password) if password else None


def _known_options(scheme: str, discovery: str) -> Mapping[str, tuple[str, ...]]:
    tls = _TLS_OPTIONS if scheme == "rediss" else {}
    if discovery != "sentinel":
        return tls
    return {**tls, **_SENTINEL_OPTIONS, **({"sentinel_ssl": ("true", "false")} if tls else {})}


def _options(query: str, known: Mapping[str, tuple[str, ...]]) -> Mapping[str, str]:
    options = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in known:
            shown = f" {name!r}" if _OPTION_NAME.fullmatch(name) and "@" not in query else ""
            tls = ", and TLS is spoken with rediss:// alone" if name in _TLS_OPTIONS else ""
            raise ValueError(f"unknown option{shown}: this scheme has {', '.join(known) or 'none'}{tls}")
        if not value or (known[name] and value not in known[name]):
            raise ValueError(f"{name} must be {' or '.join(known[name]) or 'given a value'}")
        options[name] = unquote(value)
    return options


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
