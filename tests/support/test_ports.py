"""Ports that the kernel keeps for this process."""

from __future__ import annotations

import socket

import pytest

from tests.support.ports import HOST, free_port, ports_in_a_row


def test_a_server_listens_on_a_port_again_and_again_and_in_between_nothing_answers() -> None:
    port = free_port()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
        with socket.create_server((HOST, port)), socket.create_connection((HOST, port)):
            pass


def test_no_port_is_given_twice_and_who_does_not_share_it_cannot_have_it() -> None:
    first, other = ports_in_a_row(3), free_port(10)
    kept = {first, first + 1, first + 2, other, other + 10}

    assert len(kept) == 5
    assert kept.isdisjoint(free_port() for _ in range(20))
    for port in kept:
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind((HOST, port))
