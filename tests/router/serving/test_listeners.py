"""Bound sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest
import uvloop

from dualmap.router.serving.listeners import advertised_host, advertised_url, bind, port_of


def test_replicas_share_a_port_and_an_own_port_is_not_shared() -> None:
    with bind("127.0.0.1", 0, shared=True) as first:
        with bind("127.0.0.1", port_of(first), shared=True) as second:
            assert port_of(second) == port_of(first)
        first.listen()
        with pytest.raises(OSError, match=str(port_of(first))):
            bind("127.0.0.1", port_of(first), shared=False)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses that the name server knows, by name."""
    known: dict[str, list[str]] = {}

    def getaddrinfo(host: str, port: int | None, **_: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_DGRAM, 0, "", (each, port or 0))
            for each in known[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostname", lambda: "pod-7")
    return known


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This machine's own address on the way to another."""
    ways: dict[str, str] = {}

    class Probe:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, address: tuple[str, int]) -> None:
            self.way = ways.get(address[0])
            if self.way is None:
                raise OSError("Network is unreachable")

        def getsockname(self) -> tuple[str | None, int]:
            return self.way, 9

    monkeypatch.setattr(socket, "socket", Probe)
    return ways


def test_an_address_is_advertised_as_it_is() -> None:
    assert advertised_host("10.1.2.3", [("redis", 6379)]) == "10.1.2.3"


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", ""])
def test_a_wildcard_is_advertised_by_the_interface_that_leads_to_the_store(
    wildcard: str, resolved: dict[str, list[str]], interfaces: dict[str, str]
) -> None:
    resolved |= {"redis": ["fd00::1", "10.0.0.1"], "pod-7": ["10.9.9.9"]}
    interfaces["10.0.0.1"] = "10.0.0.77"

    assert advertised_host(wildcard, [("gone", 6379), ("redis", 6379)]) == "10.0.0.77"


def test_an_address_that_the_port_does_not_listen_on_is_not_advertised(
    resolved: dict[str, list[str]], interfaces: dict[str, str]
) -> None:
    resolved["redis"] = ["fd00::1"]
    interfaces["fd00::1"] = "fd00::77"

    assert advertised_host("::", [("redis", 6379)]) == "fd00::77"
    assert advertised_host("0.0.0.0", [("redis", 6379)]) == "127.0.0.1"


def test_beside_its_store_a_wildcard_is_advertised_by_a_name_that_can_be_resolved(
    resolved: dict[str, list[str]], interfaces: dict[str, str]
) -> None:
    resolved["localhost"], interfaces["127.0.0.1"] = ["127.0.0.1"], "127.0.0.1"

    assert advertised_host("0.0.0.0", [("localhost", 6379)]) == advertised_host("0.0.0.0") == "127.0.0.1"
    resolved["pod-7"] = ["10.9.9.9"]
    assert advertised_host("0.0.0.0", [("localhost", 6379)]) == advertised_host("0.0.0.0") == "pod-7"


def test_an_ipv6_address_is_bracketed_in_a_url() -> None:
    assert advertised_url("fd00::7", 9000) == "http://[fd00::7]:9000"
    assert advertised_url("10.1.2.3", 9000) == "http://10.1.2.3:9000"
    assert advertised_url("fd00::7", 9000, tls=True) == "https://[fd00::7]:9000"


class Accepted(asyncio.Protocol):
    """Keeps whether the connection that it was given sends small writes at once."""

    def __init__(self, sends_at_once: asyncio.Future[bool]) -> None:
        self._sends_at_once = sends_at_once

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = transport.get_extra_info("socket")
        self._sends_at_once.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
        transport.close()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_accepted_connection_sends_a_token_at_once(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def accept_one(listener: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        sends_at_once = loop.create_future()
        server = await loop.create_server(lambda: Accepted(sends_at_once), sock=listener)
        async with server:
            _, writer = await asyncio.open_connection(*listener.getsockname())
            with contextlib.closing(writer):
                return await asyncio.wait_for(sends_at_once, 60)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(accept_one(bind("127.0.0.1", 0, shared=True)))
