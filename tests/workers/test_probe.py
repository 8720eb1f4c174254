"""Questions to a server always end with an answer, whatever the server does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import trustme

from dualmap.runtime import certificates
from dualmap.runtime.pool_settings import UpstreamSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.state.model_names import ModelList
from dualmap.workers.engine_metrics import ServerRun
from dualmap.workers.probe import EngineFacts, Health, NotSentError, Prober, version_of
from tests.statestore.tls_front import Authority
from tests.support.certificates import mounted
from tests.workers.scripted_server import ScriptedServer

METRICS = """\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1200.0
vllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="4096"} 1.0
process_start_time_seconds 1.5e+09
"""


@pytest.fixture
async def prober() -> AsyncIterator[Prober]:
    async with Prober(timeout_s=30, canary_timeout_s=30) as asking:
        yield asking


@pytest.fixture
async def impatient() -> AsyncIterator[Prober]:
    async with Prober(timeout_s=0.3, canary_timeout_s=0.3) as asking:
        yield asking


ODD_ANSWERS = [b"", b"[]", b'"x"', b"{", b'{"version": 3, "data": {}}', b'{"data": [3, {"id": 4}]}']


@pytest.mark.parametrize("body", [*ODD_ANSWERS, b'{"version": "%b"}' % (b"9" * 101)])
def test_answers_of_a_wrong_shape_tell_nothing(body: bytes) -> None:
    assert version_of(body) is None


async def test_a_healthy_server_has_no_complaint(
    prober: Prober, servers: Callable[[], Awaitable[ScriptedServer]]
) -> None:
    server = await servers()

    assert await prober.health(server.url) == Health(None, connected=True)


async def test_a_connection_that_stays_open_shows_that_the_process_is_the_same(
    prober: Prober, servers: Callable[[], Awaitable[ScriptedServer]]
) -> None:
    server = await servers()

    seen = [(await prober.health(server.url)).connected for _ in range(3)]
    await server.drop_connections()
    seen += [(await prober.health(server.url)).connected for _ in range(2)]

    assert seen == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [((503, ""), "status 503"), ((302, ""), "status 302"), (None, "no HTTP from 127.0.0.1:")],
)
async def test_every_kind_of_failure_is_a_complaint(
    prober: Prober,
    servers: Callable[[], Awaitable[ScriptedServer]],
    answer: tuple[int, str] | float | None,
    complaint: str,
) -> None:
    server = await servers()
    server.answers["/health"] = answer

    assert complaint in str((await prober.health(server.url)).complaint)


async def test_a_server_that_hangs_is_cut_off(
    impatient: Prober, servers: Callable[[], Awaitable[ScriptedServer]]
) -> None:
    server = await servers()
    server.answers |= {"/health": 60.0, "/v1/completions": 60.0}

    assert (await impatient.health(server.url)).complaint == "no answer within 0.3 s"
    assert await impatient.canary(server.url, "qwen") == "no answer within 0.3 s"


async def test_a_closed_port_is_a_complaint(prober: Prober, servers: Callable[[], Awaitable[ScriptedServer]]) -> None:
    server = await servers()
    await server.stop()

    assert "connection refused by 127.0.0.1:" in str((await prober.health(server.url)).complaint)


async def test_why_a_server_cannot_be_asked_is_said_in_words(prober: Prober, tmp_path: Path) -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        no_tls = await prober.health(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    unknown = await prober.health("http://no-such-host.invalid:8000")
    certified = Authority(tmp_path).server("127.0.0.1")
    async with await asyncio.start_server(plain, "127.0.0.1", 0, ssl=certified) as server:
        untrusted = await prober.health(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    assert "TLS: no handshake with 127.0.0.1:" in str(no_tls.complaint)
    assert "'no-such-host.invalid' cannot be resolved" in str(unknown.complaint)
    assert "TLS: the certificate of 127.0.0.1:" in str(untrusted.complaint)


async def test_a_server_that_wants_a_certificate_is_shown_the_renewed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()

    monkeypatch.setattr(certificates, "CHECK_S", 0.0)
    ca, other, wants = trustme.CA(), trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("instance.fleet").configure_cert(wants)
    ca.configure_trust(wants)
    wants.verify_mode = ssl.CERT_REQUIRED
    files = mounted(tmp_path / "tls", other.issue_cert("worker.fleet"), ca)
    upstream = UpstreamSettings(
        ca_file=files.ca, certificate_file=files.certificate, key_file=files.key, server_name="instance.fleet"
    )
    async with (
        await asyncio.start_server(healthy, "127.0.0.1", 0, ssl=wants) as server,
        Prober(timeout_s=30, trust=InstanceTrust(upstream)) as prober,
    ):
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        refused = (await prober.health(url)).complaint
        files.renew(ca.issue_cert("worker.fleet"))
        assert refused is not None and (await prober.health(url)).complaint is None


@pytest.mark.parametrize(("status", "words"), [(401, "worker.upstream_api_key"), (302, "the URL of the server itself")])
async def test_a_status_that_settings_mend_names_them(
    prober: Prober, servers: Callable[[], Awaitable[ScriptedServer]], status: int, words: str
) -> None:
    server = await servers()
    server.answers["/health"] = (status, "")

    assert words in str((await prober.health(server.url)).complaint)


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:99999", f"http://{'x' * 300}:1", "http://h ost:1"])
async def test_a_nonsense_url_is_a_complaint(prober: Prober, url: str) -> None:
    assert (await prober.health(url)).complaint is not None


async def test_a_server_that_trickles_its_answer_is_cut_off(impatient: Prober) -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            while True:
                writer.write(b".")
                await writer.drain()
                await asyncio.sleep(0.05)

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await impatient.health(f"http://127.0.0.1:{port}")).complaint == "no answer within 0.3 s"


async def test_without_files_nothing_is_asked_and_no_server_blamed(
    prober: Prober,
    servers: Callable[[], Awaitable[ScriptedServer]],
    no_files_left: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    server = await servers()

    with no_files_left():
        for question in (prober.health(server.url), prober.run(server.url), prober.canary(server.url, "qwen")):
            with pytest.raises(NotSentError):
                await question
        assert await prober.facts(server.url) == EngineFacts(None, ModelList(), None)

    assert server.requests == []
    assert (await prober.health(server.url)).complaint is None


async def test_facts_are_what_the_server_says(prober: Prober, servers: Callable[[], Awaitable[ScriptedServer]]) -> None:
    server = await servers()
    server.answers |= {
        "/version": (200, json.dumps({"version": "0.32.0"})),
        "/v1/models": (200, json.dumps({"data": [{"id": "qwen"}, {"id": "lora-1", "parent": "qwen"}]})),
        "/metrics": (200, METRICS),
    }

    assert await prober.facts(server.url) == EngineFacts(
        "0.32.0", ModelList({"qwen": "", "lora-1": "qwen"}, 200), 524_288, block_tokens=128
    )
    assert await prober.run(server.url) == ServerRun(1.5e9, 1200.0)


async def test_facts_of_a_server_that_says_nothing_are_unknown(
    prober: Prober, servers: Callable[[], Awaitable[ScriptedServer]]
) -> None:
    server = await servers()

    assert await prober.facts(server.url) == EngineFacts(None, ModelList(None, 404), None)
    assert await prober.run(server.url) is None


@pytest.mark.parametrize(
    ("answer", "passes"), [((200, "{}"), True), ((404, ""), True), ((401, ""), True), ((500, ""), False)]
)
async def test_a_canary_fails_only_where_the_engine_does(
    prober: Prober,
    servers: Callable[[], Awaitable[ScriptedServer]],
    answer: tuple[int, str] | float | None,
    passes: bool,
) -> None:
    server = await servers()
    server.answers["/v1/completions"] = answer

    assert (await prober.canary(server.url, "qwen") is None) is passes
    path, body = server.requests[-1]
    assert (path, json.loads(body)["model"], json.loads(body)["max_tokens"]) == ("/v1/completions", "qwen", 1)


async def test_the_key_that_instances_ask_for_is_sent(servers: Callable[[], Awaitable[ScriptedServer]]) -> None:
    server = await servers()
    async with Prober(timeout_s=30, canary_timeout_s=30, api_key="k-1") as prober:
        await prober.health(server.url)

    assert "authorization: bearer k-1" in server.heads[-1].lower()
