"""The server of a picker: external processing, and health, over gRPC."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

from dualmap.router.picker.ext_proc import (
    NOT_SERVING,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
)
from dualmap.router.picker.grpc_server import GrpcServer, GrpcStream, Method, Status, StatusError
from dualmap.router.picker.messages import METHOD, SERVICE
from dualmap.router.picker.picked import PickedRequest, Picker
from dualmap.router.picker.settings import PickerSettings
from dualmap.runtime.certificates import FollowedFiles, RenewedContext

log = logging.getLogger(__name__)

LIVENESS: Final = "liveness"
HEALTH_NAMES: Final = ("", "readiness", SERVICE, "inference-extension")
"""Services whose health is whether this picker takes requests; ``liveness`` is always healthy."""

_WATCH_S: Final = 1.0
"""How often the health that a client watches is compared."""
_MESSAGE_OVERHEAD_BYTES: Final = 1 << 20


class PickerServer:
    """Listens from ``start`` to ``stop``."""

    def __init__(
        self,
        settings: PickerSettings,
        picker: Picker,
        accepts_traffic: Callable[[], bool],
        *,
        max_body_bytes: int,
        reached_at: str = "127.0.0.1",
    ) -> None:
        """``reached_at``: the host at which the gateway reaches this picker. Raises CertificateError: a file of
        the settings cannot be used."""
        self._settings = settings
        self._reached_at = reached_at
        files = settings.tls
        self.certificates: tuple[FollowedFiles[ssl.SSLContext], ...] = () if files is None else (files.followed(),)
        self._picker = picker
        self._accepts_traffic = accepts_traffic
        health = {
            f"/grpc.health.v1.Health/{name}": Method(serve, HealthCheckRequest.FromString)
            for name, serve in (("Check", self._check), ("Watch", self._watch))
        }
        process = Method(self._process, ProcessingRequest.FromString)
        longest = max_body_bytes + _MESSAGE_OVERHEAD_BYTES
        self._server = GrpcServer({f"/{SERVICE}/{METHOD}": process, **health}, max_message_bytes=longest)
        self._health_server = GrpcServer(health, max_message_bytes=_MESSAGE_OVERHEAD_BYTES)

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        settings = self._settings
        tls = RenewedContext(self.certificates[0]) if self.certificates else None
        port = await self._server.listen(settings.host, settings.port, tls)
        await self._picker.first_tokens.start(settings.host, settings.first_token_port, self._reached_at)
        if settings.health_port is not None:
            await self._health_server.listen(settings.host, settings.health_port)
            await self._health_server.start()
        await self._server.start()
        return port

    async def stop(self, within_s: float, hurried: asyncio.Event) -> None:
        """Take no new requests, let those in flight finish, and cut off what has not after ``within_s``, or once
        ``hurried`` is set."""
        stopping = asyncio.create_task(self._server.drain())
        hurry = asyncio.create_task(hurried.wait())
        await asyncio.wait({stopping, hurry}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            stopping.cancel()
            self._picker.cuts_off = True
            log.warning("cut off requests that had not finished")
        await self._server.close()

    async def close(self) -> None:
        """End the health service, the last sign of life."""
        self._picker.first_tokens.close()
        await self._server.close()
        await self._health_server.close()

    def _process(self, stream: GrpcStream) -> Awaitable[None]:
        return PickedRequest(stream, self._picker, stream.peer).run()

    # health ------------------------------------------------------------------------------------------------------
    def _status(self, name: str) -> int:
        if name == LIVENESS:
            return SERVING
        if name not in HEALTH_NAMES:
            return SERVICE_UNKNOWN
        return SERVING if self._accepts_traffic() else NOT_SERVING

    async def _check(self, stream: GrpcStream) -> None:
        name = await _named(stream)
        status = self._status(name)
        if status == SERVICE_UNKNOWN:
            raise StatusError(Status.NOT_FOUND, f"there is no service {name!r}")
        await stream.write(HealthCheckResponse(status=status).SerializeToString())

    async def _watch(self, stream: GrpcStream) -> None:
        name, sent = await _named(stream), None
        while True:
            if (status := self._status(name)) != sent:
                sent = status
                await stream.write(HealthCheckResponse(status=status).SerializeToString())
            await asyncio.sleep(_WATCH_S)


async def _named(stream: GrpcStream) -> str:
    """The service whose health is requested."""
    message = await stream.read()
    return "" if message is None else str(message.service)
