"""The gRPC server of a picker, by a real client."""

from __future__ import annotations

import asyncio
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
from dualmap.runtime import certificates
from dualmap.runtime.certificates import CertificateError
from tests.router.http.kit import eventually
from tests.router.picker.streams import STREAM, Gateway, answer_head, head, prompt
from tests.router.tools import spec
from tests.support.certificates import Mounted, client_tls, mounted
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


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(ca: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    """The files of a port, which are compared at every connection."""
    monkeypatch.setattr(certificates, "CHECK_S", 0.0)
    return mounted(tmp_path / "tls", ca.issue_cert("localhost"), ca)


async def shown(port: int, ca: trustme.CA) -> str:
    """The number of the certificate that the port shows."""
    tls = client_tls(ca)
    tls.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("localhost", port, ssl=tls)
    number = str(writer.get_extra_info("peercert")["serialNumber"])
    writer.transport.abort()
    return number


async def test_new_connections_get_the_renewed_certificate_and_a_broken_one_changes_nothing(
    gateway: Gateway, ca: trustme.CA, files: Mounted
) -> None:
    async with Served(gateway, local(tls_certificate=files.certificate, tls_key=files.key)) as served:
        [followed] = served.server.certificates
        first = await shown(served.port, ca)
        files.renew(ca.issue_cert("localhost"))
        second = await shown(served.port, ca)
        assert second != first
        files.renew(ca.issue_cert("localhost"), key=trustme.CA().issue_cert("x").private_key_pem.bytes())
        assert await shown(served.port, ca) == second
        assert "picker.tls_key" in followed.report().problem


async def test_a_client_needs_a_certificate_of_the_named_cas_as_they_are_by_now(
    gateway: Gateway, ca: trustme.CA, files: Mounted
) -> None:
    other, own_pool = trustme.CA(), (("grpc.use_local_subchannel_pool", 1),)
    settings = local(tls_certificate=files.certificate, tls_key=files.key, tls_client_ca=files.ca)

    async with Served(gateway, settings) as served:

        async def admitted(client: trustme.LeafCert | None) -> bool:
            pair = () if client is None else (client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes())
            shows = grpc.ssl_channel_credentials(ca.cert_pem.bytes(), *pair)
            async with grpc.aio.secure_channel(f"localhost:{served.port}", shows, own_pool) as channel:
                try:
                    return bool(await served.health(channel, "") == SERVING)
                except grpc.aio.AioRpcError:
                    return False

        named, stranger = ca.issue_cert("envoy"), other.issue_cert("envoy")
        assert await admitted(named) and not await admitted(None) and not await admitted(stranger)
        files.renew(ca.issue_cert("localhost"), other)
        assert await admitted(stranger) and not await admitted(named)


async def test_files_that_do_not_fit_are_refused_before_anything_starts(gateway: Gateway, files: Mounted) -> None:
    files.key.unlink()
    with pytest.raises(CertificateError, match=r"picker\.tls_key .*cannot be read"):
        Served(gateway, local(tls_certificate=files.certificate, tls_key=files.key))
