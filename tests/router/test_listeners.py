"""Bound sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest
import uvloop

from router.listeners import advertised_host, advertised_url, bind, port_of


def test_replicas_share_a_port_and_an_own_port_is_not_shared() -> None:
    with bind("127.0.0.1", 0, shared=True) as first:
        with bind("127.0.0.1", port_of(first), shared=True) as second:
            assert port_of(second) == port_of(first)
        first.listen()
        with pytest.raises(OSError, match=str(port_of(first))):
            bind("127.0.0.1", port_of(first), shared=False)


def test_a_wildcard_is_advertised_by_the_hosts_name() -> None:
    assert advertised_host("0.0.0.0") == socket.gethostname()
    assert advertised_host("10.1.2.3") == "10.1.2.3"


def test_an_ipv6_address_is_bracketed_in_a_url() -> None:
    assert advertised_url("fd00::7", 9000) == "http://[fd00::7]:9000"
    assert advertised_url("10.1.2.3", 9000) == "http://10.1.2.3:9000"
    assert advertised_url("::", 9000) == f"http://{socket.gethostname()}:9000"


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
