"""Ports for servers of tests that must know them before they listen, or keep them while they are down."""

from __future__ import annotations

import contextlib
import socket

HOST = "127.0.0.1"
_ATTEMPTS = 1000
_kept: list[contextlib.ExitStack] = []
"""These keep sockets bound to the ports that were given, as long as this process lives."""


def free_port(*also: int) -> int:
    """A port that the kernel gives, and gives to nothing else while this process lives: to no process that wants any
    port, and to no connection. A server may listen there, and again after it was down.

    ``also`` are distances of other ports that belong to it: those so far above it are kept as well.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.ExitStack() as bound, contextlib.suppress(OSError, OverflowError):
            first = _bind(bound, 0)
            for distance in also:
                _bind(bound, first + distance)
            _kept.append(bound.pop_all())
            return first
    raise OSError(f"no free port with others {also} above it")


def ports_in_a_row(count: int) -> int:
    """The first of so many ports in a row."""
    return free_port(*range(1, count))


def _bind(bound: contextlib.ExitStack, port: int) -> int:
    keeper = bound.enter_context(socket.socket())
    keeper.bind((HOST, port))  # which fails where anybody else has it
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on a server that sets this may share it
    return int(keeper.getsockname()[1])
