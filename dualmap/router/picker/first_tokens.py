"""Reports of first tokens: a filter of the gateway sends one for each stream, as soon as output passes there.

    POST /KEY HTTP/1.1

So first tokens are seen, and no token costs the picker anything. The key stands for one stream, and is told to the
gateway with the head of its answer; without it nothing can be reported.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from itertools import count
from typing import Final, cast

log = logging.getLogger(__name__)

_LONGEST_HEAD_BYTES: Final = 16 << 10
_TAKEN: Final = b"HTTP/1.1 204 No Content\r\n\r\n"
_UNREADABLE: Final = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class FirstTokens:
    """The streams whose first tokens are awaited. It listens from ``start`` to ``close``."""

    def __init__(self) -> None:
        self._awaited: dict[bytes, Callable[[], None]] = {}
        self._prefix = secrets.token_hex(8)
        self._numbers = count()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Transport] = set()
        self._place = ""

    def __len__(self) -> int:
        return len(self._awaited)

    @property
    def listens(self) -> bool:
        return bool(self._place)

    async def start(self, host: str, port: int, reached_at: str) -> None:
        """Listen. ``reached_at``: the host at which the gateway reaches this picker. Where it has no address, nothing
        can be reported.

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(reached_at, 0, type=socket.SOCK_STREAM)
        except OSError as error:
            log.warning("first tokens cannot be reported: %s cannot be resolved: %s", reached_at, error)
            return
        *_, (address, *_) = min(found, key=lambda each: each[0] is not socket.AF_INET)
        self._server = await loop.create_server(lambda: _Connection(self._reported, self._connections), host, port)
        taken: int = self._server.sockets[0].getsockname()[1]
        self._place = f"[{address}]:{taken}/" if ":" in str(address) else f"{address}:{taken}/"

    def close(self) -> None:
        self._place = ""
        if self._server is not None:
            self._server.close()
        for transport in list(self._connections):
            transport.abort()

    def expect(self, on_first_token: Callable[[], None]) -> str:
        """Await the first token of a stream; returns where it is to be reported: ``ADDRESS:PORT/KEY``."""
        key = f"{self._prefix}{next(self._numbers):x}"
        self._awaited[key.encode()] = on_first_token
        return self._place + key

    def forget(self, place: str) -> None:
        """Await it no more, if it has not come."""
        self._awaited.pop(place.rpartition("/")[2].encode(), None)

    def _reported(self, key: bytes) -> None:
        on_first_token = self._awaited.pop(key, None)
        if on_first_token is not None:
            on_first_token()


class _Connection(asyncio.Protocol):
    """A connection of the gateway: requests without a body, one after another."""

    _transport: asyncio.Transport

    def __init__(self, reported: Callable[[bytes], None], connections: set[asyncio.Transport]) -> None:
        self._reported = reported
        self._connections = connections
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._connections.add(self._transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        read = self._read + data if self._read else data
        while (end := read.find(b"\r\n\r\n")) >= 0:
            if not self._take(read[:end]):
                self._transport.write(_UNREADABLE)
                self._transport.close()
                return
            self._transport.write(_TAKEN)
            read = read[end + 4 :]
        self._read = read
        if len(read) > _LONGEST_HEAD_BYTES:
            self._transport.abort()

    def _take(self, head: bytes) -> bool:
        """Take a report in; False where this is none, and where a body follows, which none has."""
        words = head[: head.find(b"\r\n")].split(b" ")
        if len(words) != 3 or words[0] != b"POST" or not words[2].startswith(b"HTTP/1."):
            return False
        fields = head.lower()
        length = fields.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0].strip()
        if length not in (b"", b"0") or b"\r\ntransfer-encoding:" in fields:
            return False
        self._reported(words[1][1:])
        return True
