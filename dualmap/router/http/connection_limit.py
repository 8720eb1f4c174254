"""How many connections each port of a replica takes: the health of a full endpoint can still be checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_OPS_CONNECTIONS: Final = 64
"""Connections to a replica's own port at most: probes, scrapes, other replicas."""


@dataclass(slots=True)
class ConnectionLimit:
    """The limit of one port, and how many connections are open there."""

    max_connections: int
    when_full: str
    """The error for a client beyond the limit."""
    connections: int = 0


def connection_limit_finder(
    max_connections: int, ops_port: int | None
) -> Callable[[asyncio.BaseTransport], ConnectionLimit]:
    """A function that gives the limit that a connection counts for; ``ops_port`` is the replica's own, if any."""
    endpoint = ConnectionLimit(
        max_connections,
        f"this replica has reached its limit of {max_connections} connections; try again, or raise"
        " router.max_connections",
    )
    ops = ConnectionLimit(
        MAX_OPS_CONNECTIONS,
        f"the ops port has reached its limit of {MAX_OPS_CONNECTIONS} connections; send requests to router.port,"
        " not here",
    )

    def find(transport: asyncio.BaseTransport) -> ConnectionLimit:
        if ops_port is None:
            return endpoint
        name = transport.get_extra_info("sockname")
        return ops if isinstance(name, tuple) and name[1] == ops_port else endpoint

    return find
