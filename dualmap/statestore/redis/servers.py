"""Connections by a store URL, each to the server that has a pool when the connection is made.

After a failover of Sentinel or a move of a cluster's slot, it connects again. All Sentinels or nodes are queried at
once, and the newest or the most common answer is believed: one that is down, cut off or out of date costs no more than
the time to wait for it. This is never done on the path of a request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from redis.asyncio import ConnectionPool
from redis.crc import key_slot

from dualmap.runtime.certificates import (
    FollowedFiles,
    RenewedContext,
    load_certificate,
    trusting_alone,
)
from dualmap.statestore.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.scripts import NO_SCRIPTS
from dualmap.statestore.redis.connections import Address, Place, connection_pool
from dualmap.statestore.redis.wire import WireCalls
from dualmap.statestore.url import parse_store_url, without_password

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class Servers:
    """The servers behind a ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or ``redis+cluster://``
    URL; ``rediss+…`` speaks TLS to whom it names and to the servers that it finds."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """
        Raises:
            StoreConfigurationError: the URL cannot be understood, or a file that it names cannot be used.
        """
        try:
            self._url = parsed = parse_store_url(url)
            self.certificates: tuple[FollowedFiles[ssl.SSLContext], ...] = (
                _followed(parsed.options) if parsed.scheme == "rediss" else ()
            )
        except ValueError as error:
            raise StoreConfigurationError(f"store.url {without_password(url)!r}: {error}") from error
        self._tls = RenewedContext(self.certificates[0]) if self.certificates else None
        if not parsed.nodes and parsed.scheme != "unix":
            raise StoreConfigurationError(f"store.url {without_password(url)!r} names no server")
        self._login = {"username": parsed.username, "password": parsed.password, "db": parsed.db}
        self._timeout_s = timeout_s
        self._learned: Collection[Address] = ()
        """All nodes of the cluster, by the last answer. They are queried when none of those that the URL names answers.
        """

    @property
    def spread(self) -> bool:
        """Whether pools may have different servers."""
        return self._url.discovery == "cluster"

    def connections(self, keys: PoolKeys) -> ConnectionPool:
        """A pool of redis-py's connections to the server that has the pool's keys. Connecting raises
        StoreUnavailableError or StoreConfigurationError."""
        return connection_pool(self.place(keys), self._login, self._timeout_s, tls=self._tls)

    def place(self, keys: PoolKeys) -> Place:
        parsed = self._url
        if parsed.scheme == "unix":
            return parsed.path
        if parsed.discovery == "sentinel":
            return self._master
        if parsed.discovery == "cluster":
            return partial(self._owner, keys)
        return parsed.nodes[0]

    async def _master(self) -> Address:
        """The master of the latest failover that any Sentinel knows."""
        parsed, options = self._url, self._url.options
        login = {"username": options.get("sentinel_username"), "password": options.get("sentinel_password")}
        tls = None if options.get("sentinel_ssl") == "false" else self._tls
        command = ("SENTINEL", "MASTER", parsed.master)
        try:
            answers = await self._query(parsed.nodes, command, login, tls, "sentinel_username or sentinel_password")
        except StoreUnavailableError as error:
            raise StoreUnavailableError(f"no Sentinel names a master {parsed.master!r}: {error}") from error
        masters = [dict(zip(reply[::2], reply[1::2], strict=True)) for _, reply in answers]
        latest = max(masters, key=lambda master: int(master[b"config-epoch"]))
        return latest[b"ip"].decode(), int(latest[b"port"])

    async def _owner(self, keys: PoolKeys) -> Address:
        """The node that owns the pool's slot: the one that most of the queried nodes name."""
        command, slot = ("CLUSTER", "SLOTS"), key_slot(keys.meta)
        try:
            answers = await self._query(self._url.nodes, command, self._login, self._tls)
        except StoreUnavailableError as error:
            if not self._learned:
                raise StoreUnavailableError(f"no node of the cluster answers: {error}") from error
            answers = await self._query(self._learned, command, self._login, self._tls)
        owners, learned = Counter[Address](), set[Address]()
        for (queried, _), ranges in answers:
            for first, last, *nodes in ranges:
                # A node that does not know its own address leaves it out: it is the address that was queried.
                owner, *replicas = [(node[0].decode() if node[0] else queried, int(node[1])) for node in nodes]
                learned.update((owner, *replicas))
                if first <= slot <= last:
                    owners[owner] += 1
        self._learned = sorted(learned)
        if not owners:
            raise StoreUnavailableError(f"no node of the cluster owns the slot of {keys.meta.decode()!r}")
        return owners.most_common(1)[0][0]

    async def _query(
        self,
        servers: Collection[Address],
        command: Command,
        login: Mapping[str, Any],
        tls: ssl.SSLContext | None,
        credentials: str = "user or password",
    ) -> list[tuple[Address, Any]]:
        """The reply of each server within a third of the time to connect; servers without one are left out.

        Raises:
            StoreConfigurationError: none answers, and one that is there refuses this client or the command.
            StoreUnavailableError: none answers.
        """

        async def query(server: Address) -> tuple[Address, Any]:
            timeout_s = self._timeout_s / 3
            pool = connection_pool(server, login, timeout_s, tls=tls, credentials=credentials)
            calls = WireCalls(pool, NO_SCRIPTS, timeout_s)
            try:
                return server, await calls.command(*command)
            except StoreError as error:
                if type(error) is StoreError:  # it knows no such command, or no such master
                    raise StoreConfigurationError(f"refused what store.url asks for: {error}") from error
                raise
            finally:
                await calls.close()

        replies = await asyncio.gather(*map(query, servers), return_exceptions=True)
        answers = [reply for reply in replies if not isinstance(reply, BaseException)]
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        if answers:
            return answers
        for error in errors:
            if not isinstance(error, StoreUnavailableError):
                raise error
        raise StoreUnavailableError("; ".join(map(str, errors)))


def _followed(options: Mapping[str, str]) -> tuple[FollowedFiles[ssl.SSLContext], ...]:
    """The TLS of the servers, which follows the files of the URL."""
    certificate = options.get("ssl_certfile")
    return (
        FollowedFiles(
            f"store.url {'ssl_ca_certs' if certificate is None else 'ssl_certfile'}",
            [Path(options[name]) for name in _FILES if name in options],
            partial(tls_context, options),
            certificate=None if certificate is None else Path(certificate),
        ),
    )


def tls_context(options: Mapping[str, str]) -> ssl.SSLContext:
    """The TLS context by the options of the store's URL, which have redis-py's names. Where redis-py would trust the
    system's authorities besides those of ``ssl_ca_certs``, this trusts these alone.

    Raises:
        CertificateError: a file cannot be used.
    """
    authorities, certificate, key = map(options.get, _FILES)
    context = ssl.create_default_context() if authorities is None else trusting_alone(Path(authorities), "ssl_ca_certs")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None:
        names = ("ssl_certfile", "ssl_keyfile")
        load_certificate(context, Path(certificate), None if key is None else Path(key), names)
    verified = options.get("ssl_cert_reqs") != "none"
    context.check_hostname = verified and options.get("ssl_check_hostname") != "false"
    context.verify_mode = ssl.CERT_REQUIRED if verified else ssl.CERT_NONE
    return context
