"""Parsing of store URLs. No I/O: a wrong one is found before anything is started.

redis-py's own parser knows one host, and ignores what it does not understand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from urllib.parse import unquote, urlsplit

SCHEMES = "redis://, rediss://, redis+sentinel://, redis+cluster://, unix://, embedded:// or memory://"

_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL = ("sentinel_username", "sentinel_password")
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "redis": (),
    "rediss": _TLS,
    "redis+sentinel": _SENTINEL,
    "rediss+sentinel": (*_TLS, *_SENTINEL, "sentinel_ssl"),
    "redis+cluster": (),
    "rediss+cluster": _TLS,
    "unix": ("db",),
    "embedded": (),
    "memory": (),
}
"""Options of each scheme; ``ssl_…`` and ``db`` as redis-py calls them."""
_VALUES = {
    "ssl_cert_reqs": ("required", "none"),
    "ssl_check_hostname": ("true", "false"),
    "sentinel_ssl": ("true", "false"),
}
_OPTION_NAME = re.compile(r"[a-z_]{1,32}")
_SECRET_OPTION = re.compile(
    r"(?<=[?&])((?!ssl_)[^=&#]*(?:user|pass|token|key|secret|sig|auth|cred)[^=&#]*=)[^&#]*", re.IGNORECASE
)
"""Names files alone where it begins with ``ssl_``."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    scheme: str
    """``redis``, ``rediss`` (TLS), ``unix``, ``embedded`` or ``memory``."""
    discovery: str = ""
    """``sentinel``, ``cluster``, or empty for one server at a fixed address."""
    _: KW_ONLY
    username: str | None = None
    password: str | None = None
    nodes: tuple[tuple[str, int], ...] = ()
    master: str = ""
    db: int = 0
    path: str = ""
    """Path of a Unix socket, or of an embedded server's folder."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options after the question mark: only those that this scheme has, with values that they may have."""

    @property
    def of_one_process(self) -> bool:
        """No other process can join such a store."""
        return self.scheme == "memory" or (self.scheme == "embedded" and not self.path)


def parse_store_url(url: str) -> StoreUrl:
    """The parts of a store URL.

    Raises:
        ValueError: it is not one; the message repeats nothing that may be a password.
    """
    parts = urlsplit(url)
    _refuse("://" not in url, f"not a URL; use {SCHEMES}")
    _refuse(parts.scheme not in _OPTIONS, f"unknown scheme {parts.scheme!r}; use {SCHEMES}")
    scheme, _, discovery = parts.scheme.partition("+")
    remote = scheme in ("redis", "rediss")
    # First: a password that is not percent-encoded gets its own message, wherever its parts end up.
    default_port = 26379 if discovery == "sentinel" else 6379
    nodes = _nodes(parts.netloc.rpartition("@")[2], default_port) if remote else ()
    _refuse(bool(parts.fragment), "a '#' must be percent-encoded: %23")
    segments = [unquote(segment) for segment in parts.path.split("/") if segment] if remote else []
    master = segments.pop(0) if discovery == "sentinel" and segments else ""
    options = _options(parts.query, _OPTIONS[parts.scheme])
    db = segments[0] if segments else options.get("db", "0")
    path = "" if remote else unquote(parts.path)
    username, password = (unquote(part) if part else None for part in (parts.username, parts.password))
    _refuse(
        discovery == "sentinel" and not master,
        "the name of the master is missing: redis+sentinel://host:26379/MASTER/0",
    )
    _refuse(scheme == "unix" and not path, "the path of the socket is missing: unix:///PATH")
    _refuse(not db.isdecimal(), "the database is not a number: redis://host:6379/0")
    _refuse(discovery == "cluster" and db != "0", "a cluster has database 0 alone: redis+cluster://host:6379")
    _refuse(
        username is not None and password is None,
        "a user without a password: use USER:PASSWORD@ or, where there is no user, :PASSWORD@",
    )
    for name, needed in (("sentinel_username", "sentinel_password"), ("ssl_keyfile", "ssl_certfile")):
        _refuse(name in options and needed not in options, f"{name} without {needed}")
    return StoreUrl(
        scheme,
        discovery,
        username=username,
        password=password,
        nodes=nodes,
        master=master,
        db=int(db),
        path=path,
        options=options,
    )


def without_password(url: str) -> str:
    """A URL as it may be shown: users and passwords hidden, and what its options hold of secrets."""
    credentials, at, rest = url.rpartition("@")
    shown = f"{credentials.partition('://')[0]}://***:***@{rest}" if at else url
    return _SECRET_OPTION.sub(r"\1***", shown)


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise ValueError(why)


def _options(query: str, known: tuple[str, ...]) -> Mapping[str, str]:
    options = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in known:
            shown = f" {name!r}" if _OPTION_NAME.fullmatch(name) and "@" not in query else ""
            tls = ", and TLS is spoken with rediss:// alone" if name in _TLS else ""
            raise ValueError(f"unknown option{shown}: this scheme has {', '.join(known) or 'none'}{tls}")
        values = _VALUES.get(name, ())
        _refuse(
            not value or bool(values and value not in values),
            f"{name} must be {' or '.join(values) or 'given a value'}",
        )
        options[name] = unquote(value)
    return options


def _nodes(netloc: str, default_port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for part in netloc.split(","):
        one = urlsplit(f"//{part}")
        try:
            nodes.append((one.hostname or "127.0.0.1", one.port or default_port))
        except ValueError:
            raise ValueError(
                "the port is not a number up to 65535; special characters of a password must be percent-encoded"
            ) from None
    return tuple(nodes)
