"""The gRPC server of a picker: external processing, and health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from dualmap.router.picker.ext_proc import (
    NOT_SERVING,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
)
from dualmap.router.picker.messages import METHOD, SERVICE
from dualmap.router.picker.picked import LeftError, PickedRequest, Picker
from dualmap.router.picker.settings import PickerSettings
from dualmap.runtime.certificates import FollowedFiles, ServerFiles

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
        self._credentials, self.certificates = _credentials(settings.tls)
        self._picker = picker
        self._accepts_traffic = accepts_traffic
        options: Sequence[tuple[str, Any]] = (
            ("grpc.so_reuseport", 0),  # a port that is taken stops the start
            ("grpc.max_receive_message_length", max_body_bytes + _MESSAGE_OVERHEAD_BYTES),
            ("grpc.max_send_message_length", -1),
        )
        self._server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=ProcessingRequest.FromString
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: process}), self._health())
        )
        self._health_server: Any = None

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        settings = self._settings
        port = _listen(self._server, settings.host, settings.port, self._credentials)
        await self._picker.first_tokens.start(settings.host, settings.first_token_port, self._reached_at)
        if settings.health_port is not None:
            self._health_server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
            self._health_server.add_generic_rpc_handlers((self._health(),))
            _listen(self._health_server, settings.host, settings.health_port, None)
            await self._health_server.start()
        await self._server.start()
        return port

    async def stop(self, within_s: float, hurried: asyncio.Event) -> None:
        """Take no new requests, let those in flight finish, and cut off what has not after ``within_s``, or once
        ``hurried`` is set."""
        stopping = asyncio.create_task(self._server.stop(None if within_s <= 0 else within_s + _WATCH_S))
        hurry = asyncio.create_task(hurried.wait())
        await asyncio.wait({stopping, hurry}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            self._picker.cuts_off = True
            log.warning("cut off requests that had not finished")
            await self._server.stop(None)
        await stopping

    async def close(self) -> None:
        """End the health service, the last sign of life."""
        self._picker.first_tokens.close()
        await self._server.stop(None)
        if self._health_server is not None:
            await self._health_server.stop(None)

    async def _process(self, _: Any, context: Any) -> None:
        await PickedRequest(_GrpcStream(context), self._picker, context.peer()).run()

    # health ------------------------------------------------------------------------------------------------------
    def _health(self) -> Any:
        answered = HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, *answered),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, *answered),
            },
        )

    def _status(self, name: str) -> int:
        if name == LIVENESS:
            return SERVING
        if name not in HEALTH_NAMES:
            return SERVICE_UNKNOWN
        return SERVING if self._accepts_traffic() else NOT_SERVING

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return HealthCheckResponse(status=status)

    async def _watch(self, request: Any, context: Any) -> None:
        told = None
        while True:
            if (status := self._status(request.service)) != told:
                told = status
                await context.write(HealthCheckResponse(status=status))
            await asyncio.sleep(_WATCH_S)


class _GrpcStream:
    """The stream of a request over gRPC."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> Any | None:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def write(self, reply: bytes) -> None:
        try:
            await self._context.write(reply)
        except Exception as error:
            if self._context.done():
                raise LeftError from error
            raise


def _listen(server: Any, host: str, port: int, credentials: Any) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def _credentials(files: ServerFiles | None) -> tuple[Any, tuple[FollowedFiles[Any], ...]]:
    """Credentials that follow their files, and these; None without TLS.

    Raises:
        CertificateError: the files cannot be used.
    """
    if files is None:
        return None, ()

    def read() -> Any:
        files.context()  # says what is wrong, which gRPC does not
        pair = (files.key.read_bytes(), files.certificate.read_bytes())
        authorities = None if files.client_ca is None else files.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    followed = FollowedFiles(files.name, files.paths, read, certificate=files.certificate)
    in_use = followed.current()

    def fetch() -> Any:
        """The certificate, where it changed since the last connection. gRPC calls this in a thread of its own."""
        nonlocal in_use
        if (current := followed.current()) is in_use:
            return None
        in_use = current
        return current

    credentials = grpc.dynamic_ssl_server_credentials(
        in_use, fetch, require_client_authentication=files.requires_client
    )
    return credentials, (followed,)
