"""Bound sockets."""

from __future__ import annotations

import socket

import pytest

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
