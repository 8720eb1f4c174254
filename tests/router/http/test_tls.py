"""TLS on both sides: instances behind https, clients of an endpoint that serves https itself."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from dualmap.router.settings import RouterSettings
from dualmap.runtime import certificates
from dualmap.runtime.certificates import RenewedContext
from dualmap.runtime.pool_settings import UpstreamSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.request.outcome import FailureKind, Outcome
from tests.router.http import kit
from tests.router.http.kit import StartInstance, StartRouter, Talk
from tests.support.certificates import Mounted, mounted
from tests.support.certificates import client_tls as trusting

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


# renewed certificates, certificates of clients -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def compared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are compared at every connection."""
    monkeypatch.setattr(certificates, "CHECK_S", 0.0)


def port_settings(files: Mounted, *required_for: str, client_ca: bool = True) -> dict[str, Any]:
    own: dict[str, Any] = {"tls_certificate": files.certificate, "tls_key": files.key}
    return own | ({"tls_client_ca": files.ca, "tls_client_required_for": required_for} if client_ca else {})


def port_tls(settings: dict[str, Any]) -> RenewedContext:
    tls = RouterSettings(**settings).tls
    assert tls is not None
    return RenewedContext(tls.followed())


def serial(client: kit.Client) -> str:
    """The number of the certificate that the endpoint showed."""
    return str(client.writer.get_extra_info("peercert")["serialNumber"])


async def test_a_stream_outlives_the_renewal_of_the_endpoints_certificate(
    start_instance: StartInstance, start_router: StartRouter, ca: trustme.CA, tmp_path: Path, compared_each_time: None
) -> None:
    go_on = asyncio.Event()

    async def interrupted(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("before")
        await go_on.wait()
        await talk.token("after")
        await talk.end_stream()

    files = mounted(tmp_path / "tls", ca.issue_cert("127.0.0.1"), ca)
    settings = port_settings(files, client_ca=False)
    intake = kit.Intake([(await start_instance(interrupted)).url])
    router = await start_router(intake, tls=port_tls(settings), **settings)
    streaming = await router.connect(tls=trusting(ca))
    streaming.chat(stream=True)
    await streaming.head()
    await streaming.chunk()

    files.renew(ca.issue_cert("127.0.0.1"))
    later = await router.connect(tls=trusting(ca))
    later.request("/health", method="GET")
    assert (await later.answer()).status == 200
    assert serial(later) != serial(streaming)
    files.renew(ca.issue_cert("127.0.0.1"), key=b"no key")
    assert serial(await router.connect(tls=trusting(ca))) == serial(later), "a broken renewal changes nothing"
    go_on.set()
    rest = await streaming.chunk()
    while b"[DONE]" not in rest:  # what comes at once may be one chunk
        piece = await streaming.chunk()
        assert piece, "the stream ended before its answer"
        rest += piece
    assert b"after" in rest


async def answered(router: kit.Router, tls: ssl.SSLContext, path: str) -> int | None:
    """The status of an answer; None where the connection is refused."""
    try:
        client = await router.connect(tls=tls)
        if path == kit.CHAT:
            client.chat()
        else:
            client.request(path, method="GET")
        return (await client.answer()).status
    except (OSError, asyncio.IncompleteReadError):  # in TLS 1.3 the server refuses behind the client's last message
        return None


@pytest.mark.parametrize(
    ("required_for", "without"),
    [
        (("connections",), {"/health": None, "/v1/models": None, kit.CHAT: None, "/admin/instances": None}),
        (("inference",), {"/health": 200, "/v1/models": 403, kit.CHAT: 403, "/admin/instances": 200}),
        (("admin",), {"/health": 200, "/v1/models": 200, kit.CHAT: 200, "/admin/instances": 403, "/sleep": 403}),
        ((), {"/health": 200, "/v1/models": 200, kit.CHAT: 200, "/admin/instances": 200}),
    ],
)
async def test_a_client_certificate_is_needed_where_the_settings_say_so(
    required_for: tuple[str, ...],
    without: dict[str, int | None],
    start_instance: StartInstance,
    start_router: StartRouter,
    ca: trustme.CA,
    tmp_path: Path,
) -> None:
    async def answer(talk: Talk) -> None:
        await talk.answer()

    files = mounted(tmp_path / "tls", ca.issue_cert("127.0.0.1"), ca)
    settings = port_settings(files, *required_for)
    intake = kit.Intake([(await start_instance(answer)).url])
    router = await start_router(intake, tls=port_tls(settings), **settings)
    named = trusting(ca, ca.issue_cert("client.example"))
    stranger = trusting(ca, trustme.CA().issue_cert("client.example"))

    for path, status in without.items():
        assert await answered(router, trusting(ca), path) == status, path
        assert await answered(router, named, path) == 200, path
        assert await answered(router, stranger, path) is None, "another CA is never accepted"
    assert {request.client for request in intake.requests} - {None} == {"client.example"}


async def test_the_ops_port_is_no_way_around_client_certificates(
    start_router: StartRouter, ca: trustme.CA, tmp_path: Path
) -> None:
    files = mounted(tmp_path / "tls", ca.issue_cert("127.0.0.1"), ca)
    plain = await start_router(kit.Intake(["http://127.0.0.1:1"]), **port_settings(files, "connections"))
    client = await plain.connect()
    client.chat()
    refusal = await client.answer()
    assert refusal.status == 404 and "send it to router.port, by https" in refusal.error["message"]
    client = await plain.connect()
    client.request("/health", method="GET")
    assert (await client.answer()).status == 200


async def test_an_instance_that_wants_a_certificate_is_shown_the_renewed_one(
    start_instance: StartInstance, start_router: StartRouter, ca: trustme.CA, tmp_path: Path, compared_each_time: None
) -> None:
    shown: list[str] = []

    async def note(talk: Talk) -> None:
        shown.append(str(talk.writer.get_extra_info("peercert")["serialNumber"]))
        await talk.answer(extra="connection: close\r\n")

    wants = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("instance.fleet").configure_cert(wants)
    ca.configure_trust(wants)
    wants.verify_mode = ssl.CERT_REQUIRED
    instance = await start_instance(note, tls=wants)  # reached by an address that its certificate does not name
    files = mounted(tmp_path / "tls", ca.issue_cert("router.fleet"), ca)
    own = {"ca_file": files.ca, "certificate_file": files.certificate, "key_file": files.key}

    async def ask(router: kit.Router) -> int:
        client = await router.connect()
        client.chat()
        return (await client.answer()).status

    intake = kit.Intake([instance.url])
    strict = await start_router(intake, trust=InstanceTrust(UpstreamSettings(**own)))
    assert await ask(strict) == 502, "the name is verified"
    careless = await start_router(intake, trust=InstanceTrust(UpstreamSettings(**own, verify_name=False)))
    assert await ask(careless) == 200
    router = await start_router(intake, trust=InstanceTrust(UpstreamSettings(**own, server_name="instance.fleet")))
    assert await ask(router) == 200
    files.renew(ca.issue_cert("router.fleet"))
    assert await ask(router) == 200
    files.renew(trustme.CA().issue_cert("router.fleet"))  # of a CA that the instance does not know
    assert await ask(router) == 502
    files.renew(ca.issue_cert("router.fleet"))
    assert await ask(router) == 200
    assert len(shown) == 4 and len(set(shown)) == 3
