"""Connections to instances, kept warm between requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from dualmap.router.errors import OutOfFilesError
from dualmap.router.http.deadlines import DeadlineChecks
from dualmap.router.http.upstream import UpstreamConnection
from dualmap.runtime.open_files import ShortageLog, out_of_files
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure

_log = logging.getLogger(__name__)


class ConnectError(Exception):
    """No connection to the instance could be made."""

    def __init__(self, failure: InstanceFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Origin:
    """The address in an instance's URL."""

    host: str
    port: int
    tls: bool
    authority: bytes
    """The value of ``Host``."""
    base_path: bytes
    """Goes before every path; empty for most."""


@lru_cache(maxsize=4096)
def parse_origin(url: str) -> Origin:
    """The parts of an instance's base URL.

    Raises:
        ValueError: it is not an http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {url}")
    tls = parts.scheme == "https"
    authority = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii")
    return Origin(parts.hostname, parts.port or (443 if tls else 80), tls, authority, parts.path.rstrip("/").encode())


class UpstreamPool:
    """Idle keep-alive connections by instance URL: the last used first, a bounded number, closed when they age.

    A connection in use belongs to its user, who returns it by ``release`` or aborts it. The pool does not limit their
    number: scheduled requests wait for room at their instance, and requests passed on, which reserve nothing, are
    limited by ``router.max_requests``.
    """

    def __init__(
        self,
        deadlines: DeadlineChecks,
        *,
        connect_timeout_s: float,
        idle_s: float,
        max_idle: int,
        trust: InstanceTrust | None = None,
    ) -> None:
        self._deadlines = deadlines
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._max_idle = max_idle
        self._idle: dict[str, list[UpstreamConnection]] = {}
        self._trust = trust or InstanceTrust()
        self._closed = False
        self._shortage_log = ShortageLog()

    def take_idle(self, url: str) -> UpstreamConnection | None:
        """The idle connection that was used last, if one is still usable."""
        stack = self._idle.get(url)
        if not stack:
            return None
        oldest_s = stack[-1].loop.time() - self._idle_s
        while stack:
            connection = stack.pop()
            # This is tested at the moment of use: the instance may have closed it, or sent bytes, since the last check.
            if connection.idle_since_s >= oldest_s and connection.still_reusable:
                connection.reused = True
                return connection
            connection.abort()
        return None

    async def connect(self, url: str) -> UpstreamConnection:
        """A new connection to the instance.

        Raises:
            ConnectError: refused, unreachable, or not within the time to connect.
            OutOfFilesError: this process has no file descriptor left; it is no instance's fault.
        """
        try:
            origin = parse_origin(url)
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: UpstreamConnection(url),
                    origin.host,
                    origin.port,
                    ssl=self._trust.context if origin.tls else None,
                )
        except TimeoutError as error:
            detail = f"no connection within {self._connect_timeout_s:g} s"
            raise ConnectError(InstanceFailure(FailureKind.CONNECT, detail)) from error
        except (OSError, ValueError) as error:
            if out_of_files(error):
                raise self._shortage() from error
            raise ConnectError(InstanceFailure(FailureKind.CONNECT, str(error))) from error
        return connection

    def _shortage(self) -> OutOfFilesError:
        shortage = OutOfFilesError(
            "this replica has no file descriptor left; try again, and raise its limit of open files",
            retry_after_s=1.0,
        )
        if self._shortage_log.due(asyncio.get_running_loop().time()):
            _log.error(
                "no file descriptor is left for connections to instances, requests are refused: raise the limit of"
                " open files (LimitNOFILE= in systemd, ulimits: nofile in compose), or lower router.max_connections"
            )
        return shortage

    def release(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose answer is complete; one that cannot be used again is closed."""
        stack = self._idle.setdefault(connection.url, [])
        if self._closed or not connection.reusable or len(stack) >= self._max_idle:
            connection.abort()
            return
        # An idle connection goes on reading: its end, and bytes that nobody requested, must be noticed before it is
        # used.
        connection.resume_reading()
        connection.idle_since_s = connection.loop.time()
        stack.append(connection)
        self._deadlines.add(self)

    def check_deadlines(self, now_s: float) -> None:
        """Close what idled too long or was closed by its instance."""
        for url, stack in list(self._idle.items()):
            kept = []
            for connection in stack:
                if connection.reusable and now_s - connection.idle_since_s < self._idle_s:
                    kept.append(connection)
                else:
                    connection.abort()
            if kept:
                self._idle[url] = kept
            else:
                del self._idle[url]
        if not self._idle:
            self._deadlines.discard(self)

    @property
    def idle_connections(self) -> int:
        return sum(len(stack) for stack in self._idle.values())

    def close(self) -> None:
        """Close all idle connections; those in use close when they are released."""
        self._closed = True
        for stack in self._idle.values():
            for connection in stack:
                connection.abort()
        self._idle.clear()
