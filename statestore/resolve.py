"""From a store URL to the server that has a pool at this moment.

Asked anew before every attempt to connect, so a failover of Sentinel or a move of a cluster's slot is followed by
connecting again. redis-py does the discovery; it is never on the path of a request.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from statestore.endpoint import Endpoint
from statestore.errors import StoreConfigurationError, StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.url import parse_store_url


class Resolver(Protocol):
    one_server: bool
    """Whether all pools share a server, and so a connection."""

    async def endpoint(self, keys: PoolKeys) -> Endpoint:
        """The server that owns a pool's keys.

        Raises:
            StoreUnavailableError: nobody knows at the moment.
        """


def resolver_of(url: str, timeout_s: float) -> Resolver:
    """The resolver for a ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or ``redis+cluster://`` URL;
    ``rediss+…`` speaks TLS to the servers it finds.

    Raises:
        StoreConfigurationError: the URL cannot be understood.
    """
    try:
        parsed = parse_store_url(url)
        base = Endpoint(
            username=parsed.username,
            password=parsed.password,
            db=parsed.db,
            tls=_tls(parsed.query) if parsed.scheme == "rediss" else None,
        )
    except ValueError as error:
        raise StoreConfigurationError(f"store.url {without_password(url)!r}: {error}") from error
    nodes = list(parsed.nodes)
    if parsed.scheme == "unix":
        return Direct(replace(base, unix_path=parsed.path))
    if parsed.discovery == "sentinel":
        return ViaSentinel(nodes, parsed.master, base, timeout_s)
    if parsed.discovery == "cluster":
        return ViaCluster(nodes, base, timeout_s)
    if not nodes:
        raise StoreConfigurationError(f"store.url {without_password(url)!r} names no server")
    host, port = nodes[0]
    return Direct(replace(base, host=host, port=port))


def _tls(query: Mapping[str, str]) -> ssl.SSLContext:
    """The usual verification; ``ssl_ca_certs=FILE`` adds an authority, ``ssl_cert_reqs=none`` trusts anybody."""
    file = query.get("ssl_ca_certs")
    try:
        context = ssl.create_default_context(cafile=file)
    except OSError as error:  # among them ssl.SSLError
        raise ValueError(f"the certificates of ssl_ca_certs={file} cannot be read: {error}") from error
    if query.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def without_password(url: str) -> str:
    """A store URL as it may be shown: its user and password hidden."""
    credentials, at, rest = url.rpartition("@")
    return f"{credentials.partition('://')[0]}://***@{rest}" if at else url


class Direct:
    """One server at a fixed address."""

    one_server = True

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def endpoint(self, keys: PoolKeys) -> Endpoint:
        return self._endpoint


class ViaSentinel:
    """The present master of a Sentinel-watched group."""

    one_server = True

    def __init__(self, sentinels: list[tuple[str, int]], master: str, base: Endpoint, timeout_s: float) -> None:
        self._sentinels = sentinels
        self._master = master
        self._base = base
        self._timeout_s = timeout_s

    async def endpoint(self, keys: PoolKeys) -> Endpoint:
        # Each is asked once and briefly, so that a dead one leaves time to ask the others.
        each_s = self._timeout_s / (len(self._sentinels) + 1)
        options = {"socket_timeout": each_s, "socket_connect_timeout": each_s, "retry": Retry(NoBackoff(), 0)}
        sentinel = Sentinel(self._sentinels, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self._master)
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"no Sentinel names a master {self._master!r}: {error}") from error
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return replace(self._base, host=str(host), port=int(port))


class ViaCluster:
    """The node of a Redis Cluster that owns the pool's slot."""

    one_server = False

    def __init__(self, nodes: list[tuple[str, int]], base: Endpoint, timeout_s: float) -> None:
        self._nodes = nodes
        self._base = base
        self._timeout_s = timeout_s

    async def endpoint(self, keys: PoolKeys) -> Endpoint:
        each_s = self._timeout_s / (len(self._nodes) + 1)
        cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._nodes],
            username=self._base.username,
            password=self._base.password,
            ssl=self._base.tls is not None,
            socket_timeout=each_s,
            socket_connect_timeout=each_s,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            await cluster.initialize()
            node = cluster.get_node_from_key(keys.meta.decode())
            if node is None:
                raise StoreUnavailableError(f"no node of the cluster owns the slot of {keys.meta.decode()!r}")
            return replace(self._base, host=str(node.host), port=int(node.port))
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"no node of the cluster answers: {error}") from error
        finally:
            await cluster.aclose()
