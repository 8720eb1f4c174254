"""TLS on both sides: instances behind https, clients of an endpoint that serves https itself."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from dualmap.scheduling.request.outcome import FailureKind, Outcome
from tests.router.http import kit
from tests.router.http.kit import StartInstance, StartRouter, Talk

# Self-signed for localhost, made for these tests alone and valid for a hundred years.
CERTIFICATE = Path(__file__).parent / "tls" / "cert.pem"
KEY = Path(__file__).parent / "tls" / "key.pem"


@pytest.fixture
def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


@pytest.fixture
def client_tls() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


async def stream(talk: Talk) -> None:
    await talk.begin_stream()
    for n in range(50):
        await talk.token(f"t{n} " * 200)
    await talk.end_stream()


async def test_an_instance_behind_https_is_verified_and_served(
    start_instance: StartInstance,
    start_router: StartRouter,
    server_tls: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    instance = await start_instance(stream, tls=server_tls)
    intake = kit.Intake([instance.url])
    client = await (await start_router(intake)).connect()
    for _ in range(3):
        client.chat(stream=True)
        answer = await client.answer()
        assert answer.whole and answer.body.endswith(b"data: [DONE]\n\n")
    assert instance.connections == 1


async def test_an_instance_whose_certificate_nobody_vouches_for_is_not_spoken_to(
    start_instance: StartInstance, start_router: StartRouter, server_tls: ssl.SSLContext
) -> None:
    instance = await start_instance(stream, tls=server_tls)
    intake = kit.Intake([instance.url])
    client = await (await start_router(intake)).connect()
    client.chat(stream=True)
    assert (await client.answer()).status == 502
    assert intake.placed_request.failures[0].kind is FailureKind.CONNECT and not instance.talks


async def test_clients_may_come_by_https(
    start_instance: StartInstance, start_router: StartRouter, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext
) -> None:
    gone = asyncio.Event()

    async def endless(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.until_closed()
        gone.set()

    instance = await start_instance(endless)
    intake = kit.Intake([instance.url])
    router = await start_router(intake, tls=server_tls)
    client = await router.connect(tls=client_tls)
    client.request("/health", method="GET")
    assert (await client.answer()).json()["app"] == "/health"
    client.chat(stream=True)
    await client.head()
    await client.chunk()
    client.close()
    await asyncio.wait_for(gone.wait(), 60.0)
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.CLIENT_GONE)
    flood = await router.connect(tls=client_tls)
    flood.send(b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 70_000)
    assert (await flood.answer()).status == 431
    assert await flood.closed()
