"""Connections of redis-py that find their server whenever they connect, in a bounded time, and say why they cannot."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from redis.asyncio import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import RedisError, ResponseError

from dualmap.scheduling.backoff import backoff_s
from dualmap.statestore.errors import StoreError
from dualmap.statestore.redis.connect_errors import connect_error

Address = tuple[str, int]
Place = str | Address | Callable[[], Awaitable[Address]]
"""Place of a server: the path of its Unix socket, its address, or how to find that out at this moment."""

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_MAX_CONNECTIONS = 65_536  # no limit: one waits and one listens for each pool of the fleet


def connection_pool(
    place: Place,
    login: Mapping[str, Any],
    timeout_s: float,
    *,
    tls: ssl.SSLContext | None = None,
    credentials: str = "user or password",
) -> ConnectionPool:
    """Connections to the server at ``place``. To connect takes ``timeout_s`` at most, and
    raises StoreUnavailableError, after which further attempts fail at once for up to a second, or
    StoreConfigurationError. ``credentials`` is what the store's URL calls those of ``login``."""
    kind: type = _TcpConnection
    arguments: dict[str, Any] = dict(login)
    if isinstance(place, str):
        kind, arguments["path"] = _UnixConnection, place
    elif tls is not None:
        kind, arguments["tls"] = _TlsConnection, tls
    return ConnectionPool(
        connection_class=kind,
        max_connections=_MAX_CONNECTIONS,
        attempts=_Attempts(place, timeout_s, credentials),
        protocol=2,
        socket_timeout=None,  # every call has a limit of its own
        socket_connect_timeout=timeout_s,
        redis_connect_func=_greet,
        driver_info=None,  # one greeting at a time, to read why a server refuses
        **arguments,
    )


async def _greet(connection: Any) -> None:
    await connection.on_connect()
    with contextlib.suppress(ResponseError):  # only people read the name
        await connection.send_command("CLIENT", "SETNAME", "dualmap", check_health=False)
        await connection.read_response()


class _Attempts:
    """Attempts to connect to one server, made less often while they fail."""

    def __init__(self, place: Place, timeout_s: float, credentials: str) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._failures = 0
        self._retry_at_s = 0.0
        self._last_error: StoreError | None = None

    async def connect(self, connection: Any, connect: Callable[[], Awaitable[None]]) -> None:
        loop, place = asyncio.get_running_loop(), self._place
        if (last := self._last_error) is not None and loop.time() < self._retry_at_s:
            raise type(last)(str(last)) from last
        try:
            async with asyncio.timeout(self._timeout_s):
                if callable(place):
                    place = await place()
                if not isinstance(place, str):
                    connection.host, connection.port = place
                await connect()
        except (StoreError, RedisError, OSError) as error:
            self._last_error = connect_error(
                error,
                place if isinstance(place, str) else f"{connection.host}:{connection.port}",
                tls=isinstance(connection, SSLConnection),
                timeout_s=self._timeout_s,
                credentials=self._credentials,
            )
            self._failures += 1
            pause_s = backoff_s(self._failures, first_s=_FIRST_BACKOFF_S, longest_s=_MAX_BACKOFF_S)
            # Spread, so that a fleet of replicas does not return to a restarted server in one instant.
            self._retry_at_s = loop.time() + pause_s * random.uniform(0.5, 1.0)
            raise self._last_error from error
        self._failures, self._last_error = 0, None


class _Located:
    """A mixin for a connection class of redis-py: it finds out where its server is before it connects."""

    is_connected: bool

    def __init__(self, *, attempts: _Attempts, **arguments: Any) -> None:
        self._attempts = attempts
        super().__init__(**arguments)

    async def connect(self) -> None:
        if not self.is_connected:
            await self._attempts.connect(self, super().connect)  # type: ignore[misc]


class _TcpConnection(_Located, Connection):
    pass


class _UnixConnection(_Located, UnixDomainSocketConnection):
    pass


class _TlsConnection(_Located, SSLConnection):
    def __init__(self, *, tls: ssl.SSLContext, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ssl_context.context = tls
