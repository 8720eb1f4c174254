"""From a store URL to the server that has a pool at this moment.

Asked anew before every attempt to connect, so a failover of Sentinel or a move of a cluster's slot is followed by
connecting again. Sentinels and nodes are asked all at once, and the newest or the most common answer is believed: one
that is down, cut off or out of date costs no more than the time to wait for it. Never on the path of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from redis.crc import key_slot

from statestore.endpoint import Endpoint
from statestore.errors import StoreConfigurationError, StoreUnavailableError
from statestore.handshake import ask_all
from statestore.keys import PoolKeys
from statestore.tls import tls_context
from statestore.url import StoreUrl, parse_store_url, without_password


class Resolver(Protocol):
    one_server: bool
    """Whether all pools share a server, and so a connection."""

    async def endpoint(self, keys: PoolKeys) -> Endpoint:
        """The server that owns a pool's keys.

        Raises:
            StoreUnavailableError: nobody knows at the moment.
            StoreConfigurationError: nobody who could know talks to this client.
        """


def resolver_of(url: str, timeout_s: float) -> Resolver:
    """The resolver for a ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or ``redis+cluster://`` URL;
    ``rediss+…`` speaks TLS to whom it names and to the servers that it finds.

    Raises:
        StoreConfigurationError: the URL cannot be understood, or a file that it names cannot be read.
    """
    try:
        parsed = parse_store_url(url)
        tls = tls_context(parsed.options) if parsed.scheme == "rediss" else None
    except ValueError as error:
        raise StoreConfigurationError(f"store.url {without_password(url)!r}: {error}") from error
    server = Endpoint(username=parsed.username, password=parsed.password, db=parsed.db, tls=tls)
    if parsed.scheme == "unix":
        return Direct(replace(server, unix_path=parsed.path))
    if not parsed.nodes:
        raise StoreConfigurationError(f"store.url {without_password(url)!r} names no server")
    if parsed.discovery == "sentinel":
        return ViaSentinel(_sentinels(parsed, server), parsed.master, server, timeout_s / 3)
    nodes = [replace(server, host=host, port=port) for host, port in parsed.nodes]
    return ViaCluster(nodes, timeout_s / 3) if parsed.discovery == "cluster" else Direct(nodes[0])


def _sentinels(parsed: StoreUrl, server: Endpoint) -> list[Endpoint]:
    """The Sentinels of a URL: with credentials of their own, and with the servers' TLS unless it says otherwise."""
    options = parsed.options
    return [
        Endpoint(
            host,
            port,
            username=options.get("sentinel_username"),
            password=options.get("sentinel_password"),
            tls=None if options.get("sentinel_ssl") == "false" else server.tls,
            credentials="sentinel_username or sentinel_password",
        )
        for host, port in parsed.nodes
    ]


class Direct:
    """One server at a fixed address."""

    one_server = True

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def endpoint(self, keys: PoolKeys) -> Endpoint:
        return self._endpoint


class ViaSentinel:
    """The present master of a Sentinel-watched group: the one of the latest failover that any Sentinel knows."""

    one_server = True

    def __init__(self, sentinels: Sequence[Endpoint], master: str, server: Endpoint, timeout_s: float) -> None:
        self._sentinels = sentinels
        self._master = master
        self._server = server
        self._timeout_s = timeout_s

    async def endpoint(self, keys: PoolKeys) -> Endpoint:
        try:
            answers = await ask_all(self._sentinels, ("SENTINEL", "MASTER", self._master), self._timeout_s)
        except StoreUnavailableError as error:
            raise StoreUnavailableError(f"no Sentinel names a master {self._master!r}: {error}") from error
        masters = [dict(zip(reply[::2], reply[1::2], strict=True)) for _, reply in answers]
        latest = max(masters, key=lambda master: int(master[b"config-epoch"]))
        return replace(self._server, host=latest[b"ip"].decode(), port=int(latest[b"port"]))


class ViaCluster:
    """The node of a cluster that owns the pool's slot: the one that most of the nodes asked name."""

    one_server = False

    def __init__(self, nodes: Sequence[Endpoint], timeout_s: float) -> None:
        self._nodes = nodes
        self._learned: list[Endpoint] = []
        """All nodes, as last heard: asked when none of those that the URL names answers."""
        self._timeout_s = timeout_s

    async def endpoint(self, keys: PoolKeys) -> Endpoint:
        slot = key_slot(keys.meta)
        try:
            answers = await self._ask()
        except StoreUnavailableError as error:
            raise StoreUnavailableError(f"no node of the cluster answers: {error}") from error
        owners: Counter[Endpoint] = Counter()
        learned: set[Endpoint] = set()
        for asked, ranges in answers:
            for first, last, *nodes in ranges:
                owner, *replicas = [_node(asked, node) for node in nodes]
                learned.update((owner, *replicas))
                if first <= slot <= last:
                    owners[owner] += 1
        self._learned = sorted(learned, key=str)
        if not owners:
            raise StoreUnavailableError(f"no node of the cluster owns the slot of {keys.meta.decode()!r}")
        return owners.most_common(1)[0][0]

    async def _ask(self) -> list[tuple[Endpoint, Any]]:
        try:
            return await ask_all(self._nodes, ("CLUSTER", "SLOTS"), self._timeout_s)
        except StoreUnavailableError:
            if not self._learned:
                raise
        return await ask_all(self._learned, ("CLUSTER", "SLOTS"), self._timeout_s)


def _node(asked: Endpoint, node: Sequence[Any]) -> Endpoint:
    """One of CLUSTER SLOTS; a node that does not know its own address leaves it to whoever reached it."""
    return replace(asked, host=node[0].decode() if node[0] else asked.host, port=int(node[1]))
