"""A replica whose store has never answered: it lives, takes no traffic, and tries again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl

import httpx
import pytest
import trustme

from dualmap.router.serving import starting
from dualmap.router.serving.listeners import bind, port_of
from dualmap.router.serving.starting import EmbeddedServer, until_store_is_there
from dualmap.statestore.errors import StoreUnavailableError
from tests.support.certificates import client_tls


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(starting, "LONGEST_PAUSE_S", 0.002)


class Store:
    """Away until told otherwise."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self.tries = 0

    async def open(self) -> str:
        self.tries += 1
        if not self.there.is_set():
            raise StoreUnavailableError("connection refused")
        return "open"


async def test_probes_are_answered_until_the_store_is_there(quick: None) -> None:
    store, listener = Store(), bind("127.0.0.1", 0, shared=True)
    url = f"http://127.0.0.1:{port_of(listener)}"
    waiting = asyncio.create_task(
        until_store_is_there(store.open, url="redis://h/0", stopping=asyncio.Event(), listener=listener)
    )
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=5), trust_env=False) as client:
        answers = [await client.get(f"{url}{path}") for path in ("/health", "/ready", "/v1/models")]

    assert [answer.status_code for answer in answers] == [200, 503, 503]
    assert [answer.json()["status"] for answer in answers[:2]] == ["starting", "starting"]
    assert answers[2].json()["error"]["code"] == "store_unavailable"

    store.there.set()
    assert await asyncio.wait_for(waiting, 60) == "open"
    server = await asyncio.start_server(lambda reader, writer: writer.close(), sock=listener)  # still ours
    server.close()


async def test_the_port_stays_closed_while_the_store_answers() -> None:
    store, listener = Store(), bind("127.0.0.1", 0, shared=True)
    store.there.set()

    async def connect_and_open() -> str:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port_of(listener))
        return await store.open()

    with listener:
        assert await until_store_is_there(
            connect_and_open, url="redis://h/0", stopping=asyncio.Event(), listener=listener
        )


async def test_a_stop_before_the_first_probe_can_be_answered_closes_what_answers_probes(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[socket.socket] = []

    class Recorded(EmbeddedServer):
        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            opened.extend(sockets or ())
            await super().serve(sockets)

    monkeypatch.setattr(starting, "EmbeddedServer", Recorded)
    store, stopping = Store(), asyncio.Event()

    async def stop_and_try() -> str:
        stopping.set()
        return await store.open()

    with bind("127.0.0.1", 0, shared=True) as listener:
        assert await until_store_is_there(stop_and_try, url="redis://h/0", stopping=stopping, listener=listener) is None

    assert [each.fileno() for each in opened] == [-1]


async def test_an_outage_is_logged_once_and_again_when_its_reason_changes(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    stopping, listener, tries = asyncio.Event(), bind("127.0.0.1", 0, shared=True), 0

    async def eighth_time() -> str:
        nonlocal tries
        tries += 1
        if tries == 8:
            stopping.set()
        raise StoreUnavailableError("nothing listens there" if tries < 5 else "no answer within 1 s")

    with caplog.at_level(logging.WARNING), listener:
        assert await until_store_is_there(eighth_time, url="redis://h/0", stopping=stopping, listener=listener) is None

    said = [record.getMessage() for record in caplog.records if record.name == starting.log.name]
    assert said == [
        "waiting for the store url=redis://h/0 failures=1: nothing listens there",
        "waiting for the store url=redis://h/0 failures=5: no answer within 1 s",
    ]


async def test_a_port_with_tls_answers_probes_by_it_and_waits_for_no_handshake_for_long(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "HANDSHAKE_S", 0.2)
    ca, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    store, listener = Store(), bind("127.0.0.1", 0, shared=True)
    waiting = asyncio.create_task(
        until_store_is_there(store.open, url="redis://h/0", stopping=asyncio.Event(), listener=listener, tls=tls)
    )
    transport = httpx.AsyncHTTPTransport(verify=client_tls(ca), retries=5)
    async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
        assert (await client.get(f"https://127.0.0.1:{port_of(listener)}/health")).json() == {"status": "starting"}

    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b"", "it is hung up on"
    writer.close()
    store.there.set()
    assert await asyncio.wait_for(waiting, 60) == "open"
    listener.close()
