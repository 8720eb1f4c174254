"""A replica that has not reached its store yet: it retries, and answers probes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

import orjson
import uvicorn

from dualmap.router.errors import StoreAwayError, error_body
from dualmap.scheduling.backoff import backoff_s, worth_logging
from dualmap.statestore.errors import StoreUnavailableError

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 4.0
OUTAGE_REPEATED_AT = 32
"""Failures after which an outage, about two minutes long then, is logged once more."""

HANDSHAKE_S = 10.0
"""Time for a client to complete a TLS handshake."""
GOOD_BYE_S = 2.0
"""Time for a client to confirm the end of a TLS connection."""

T = TypeVar("T")

_REFUSAL = error_body(StoreAwayError("this replica has not reached its store yet; try again, or ask another one"))
_ANSWERS = {
    "/health": (200, {"status": "starting"}),  # a restart would not bring the store
    "/ready": (503, {"status": "starting", "ready": False}),
}


async def until_store_is_there(
    step: Callable[[], Awaitable[T]],
    *,
    url: str,
    stopping: asyncio.Event,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
) -> T | None:
    """Repeat a step until the store answers; None after a signal to stop.

    From the first failure on, ``listener`` is served with 200 for ``/health`` and 503 for everything else; before it
    stays closed, as others may share its port. ``url`` is named in the log, ``tls`` is that of the listener.
    """
    async with contextlib.AsyncExitStack() as probes:
        failures, said = 0, ""
        while not stopping.is_set():
            try:
                return await step()
            except StoreUnavailableError as error:
                failures += 1
                if failures == 1:
                    await probes.enter_async_context(_probes_answered(listener, tls))
                if str(error) != said or (failures >= OUTAGE_REPEATED_AT and worth_logging(failures)):
                    log.warning("waiting for the store url=%s failures=%d: %s", url, failures, error)
                    said = str(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)):
                    await stopping.wait()
    return None


@contextlib.asynccontextmanager
async def _probes_answered(listener: socket.socket, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    config = uvicorn.Config(
        _answer, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = EmbeddedServer(config, tls)
    # A copy: uvicorn closes its socket, and the real server uses it next.
    serving = asyncio.create_task(server.serve(sockets=[listener.dup()]), name="starting probes")
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def _answer(
    scope: MutableMapping[str, Any],
    _receive: Callable[[], Awaitable[Any]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    status, content = _ANSWERS.get(scope["path"], (503, _REFUSAL))
    body = orjson.dumps(content)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),  # the real server takes over
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class EmbeddedServer(uvicorn.Server):
    """uvicorn's server, stopped by this module instead of by signals. With ``tls`` its sockets speak that."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            await self._listen_by_tls(self._tls, sockets or ())
        if self.should_exit:  # older versions of uvicorn leave the port open when they are stopped before they began
            await self.shutdown(sockets)

    async def _listen_by_tls(self, tls: ssl.SSLContext, sockets: Iterable[socket.socket]) -> None:
        """uvicorn makes its contexts of files alone, and lets a handshake, or a good-bye, take a minute."""
        config = self.config

        def make() -> asyncio.Protocol:
            protocol: Any = config.http_protocol_class
            made: asyncio.Protocol = protocol(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        for each in sockets:
            server = await asyncio.get_running_loop().create_server(
                make,
                sock=each,
                ssl=tls,
                backlog=config.backlog,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=GOOD_BYE_S,
            )
            self.servers.append(server)
