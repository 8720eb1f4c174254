"""The gRPC server of a picker, by a real client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from dualmap.router.picker.ext_proc import (
    NOT_SERVING,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from dualmap.router.picker.messages import METHOD, SERVICE
from dualmap.router.picker.service import HEALTH_NAMES, LIVENESS, PickerServer
from dualmap.router.picker.settings import PickerSettings
from dualmap.router.replica.runtime import Runtime
from tests.router.http.kit import eventually
from tests.router.picker.streams import STREAM, Gateway, answer_head, head, prompt
from tests.router.tools import spec
from tests.support.manual_clock import settle

StartRuntime = Callable[..., Awaitable[Runtime]]


class Served:
    """A picker that listens, and channels to it."""

    def __init__(self, gateway: Gateway, settings: PickerSettings) -> None:
        self.gateway = gateway
        self.server = PickerServer(
            settings, gateway.picker, lambda: gateway.runtime.accepts_traffic, max_body_bytes=1 << 20
        )
        self.port = 0

    async def __aenter__(self) -> Served:
        self.port = await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    def process(self, channel: Any) -> Any:
        method = channel.stream_stream(
            f"/{SERVICE}/{METHOD}",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        return method()

    async def health(self, channel: Any, name: str) -> int:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        return int((await check(HealthCheckRequest(service=name))).status)


@pytest.fixture
async def gateway(start_runtime: StartRuntime) -> Gateway:
    return Gateway(await start_runtime(instances=(spec("a", url="http://10.0.0.1:8000"),)))


def local(**settings: Any) -> PickerSettings:
    return PickerSettings(port=0, **settings)


async def test_a_request_is_answered_over_grpc(gateway: Gateway) -> None:
    async with Served(gateway, local()) as served, grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        call = served.process(channel)
        await call.write(head())
        await call.write(prompt())

        reply = await call.read()

        assert reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-gateway-destination-endpoint"]
        await call.done_writing()
        await call.read()
        assert await call.read() is grpc.aio.EOF
    assert gateway.leaves_nothing()


async def test_a_stream_that_is_reset_was_left(gateway: Gateway) -> None:
    async with Served(gateway, local()) as served, grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        call = served.process(channel)
        await call.write(head())
        await call.write(prompt(stream=True))
        await call.read()
        call.cancel()
        await eventually(gateway.leaves_nothing)
    assert gateway.outcomes == {"client_gone": 1}


async def test_health_follows_readiness_by_every_name_that_gateways_use(gateway: Gateway) -> None:
    async with Served(gateway, local()) as served, grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        assert {await served.health(channel, name) for name in (*HEALTH_NAMES, LIVENESS)} == {SERVING}
        gateway.runtime.context.draining = True
        assert {await served.health(channel, name) for name in HEALTH_NAMES} == {NOT_SERVING}
        assert await served.health(channel, LIVENESS) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.health(channel, "nothing")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        gateway.runtime.context.draining = False


async def test_health_can_be_watched(gateway: Gateway) -> None:
    async with Served(gateway, local()) as served, grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        call = watch(HealthCheckRequest(service="readiness"))
        assert (await call.read()).status == SERVING
        gateway.runtime.context.draining = True
        assert (await call.read()).status == NOT_SERVING
        gateway.runtime.context.draining = False
        call.cancel()


async def test_a_picker_that_stops_lets_requests_finish_and_cuts_off_the_rest(gateway: Gateway) -> None:
    async with Served(gateway, local()) as served, grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        call = served.process(channel)
        await call.write(head())
        await call.write(prompt(stream=True))
        await call.read()
        await call.read()
        hurried = asyncio.Event()
        stopping = asyncio.create_task(served.server.stop(30.0, hurried))
        await call.write(answer_head(fields=STREAM))
        assert (await call.read()).WhichOneof("response") == "response_headers", "it goes on"

        hurried.set()
        await stopping
        await settle()
    assert gateway.outcomes == {"cut_off": 1}


async def test_a_taken_port_is_an_error_that_names_it(gateway: Gateway) -> None:
    async with Served(gateway, local()) as served:
        other = PickerServer(PickerSettings(port=served.port), gateway.picker, lambda: True, max_body_bytes=1 << 20)
        with pytest.raises(OSError, match=str(served.port)):
            await other.start()
        await other.close()


def _write(ca: trustme.CA, folder: Path) -> None:
    made = ca.issue_cert("localhost")
    (folder / "cert.pem").write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
    (folder / "key.pem").write_bytes(made.private_key_pem.bytes())


async def test_a_certificate_is_read_again_when_it_changes(gateway: Gateway, tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    _write(first, tmp_path)
    settings = local(tls_certificate=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")

    async def trusted_by(ca: trustme.CA, port: int) -> bool:
        context = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
        context.set_alpn_protocols(["h2"])
        try:
            _, writer = await asyncio.open_connection("localhost", port, ssl=context)
        except ssl.SSLError:
            return False
        writer.close()
        return True

    async with Served(gateway, settings) as served:
        assert await trusted_by(first, served.port)
        _write(second, tmp_path)
        assert await trusted_by(second, served.port)
        (tmp_path / "key.pem").unlink()
        assert await trusted_by(second, served.port), "what cannot be read changes nothing"


async def test_a_client_without_a_certificate_is_refused_where_one_is_needed(gateway: Gateway, tmp_path: Path) -> None:
    ca = trustme.CA()
    _write(ca, tmp_path)
    (tmp_path / "ca.pem").write_bytes(ca.cert_pem.bytes())
    settings = local(
        tls_certificate=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", tls_client_ca=tmp_path / "ca.pem"
    )
    mine = ca.issue_cert("client")
    known = grpc.ssl_channel_credentials(
        ca.cert_pem.bytes(), mine.private_key_pem.bytes(), b"".join(each.bytes() for each in mine.cert_chain_pems)
    )
    async with Served(gateway, settings) as served:
        async with grpc.aio.secure_channel(f"localhost:{served.port}", known) as channel:
            assert await served.health(channel, "") == SERVING
        unknown = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
        async with grpc.aio.secure_channel(f"localhost:{served.port}", unknown) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await served.health(channel, "")
