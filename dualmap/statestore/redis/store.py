"""A Redis server, Sentinel group or cluster as a store of pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from dualmap.runtime.certificates import FollowedFiles
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.batches.batch_book import BatchBook
from dualmap.statestore.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from dualmap.statestore.keys import FleetKeys, PoolKeys
from dualmap.statestore.pool.pool_store import PoolStore
from dualmap.statestore.pool.scripts import load_scripts
from dualmap.statestore.redis.servers import Servers
from dualmap.statestore.redis.wire import OwnClock, WireCalls
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.tenants.allotment_ledger import AllotmentLedger
from dualmap.statestore.tenants.tenant_book import TenantBook

_OLDEST_VERSION = (6, 2)
_log = logging.getLogger(__name__)


class RedisStore:
    """Pools by name. All pools of one server share its connections; each of a cluster's has its own."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        scheduling: SchedulingSettings,
        own_clock: OwnClock | None = None,
    ) -> None:
        """Nothing is connected yet.

        Raises:
            StoreConfigurationError: the URL cannot be understood.
        """
        self.settings = settings
        self._scheduling = scheduling
        self._own_clock = own_clock
        self._servers = Servers(settings.url, settings.connect_timeout_s)
        self._scripts = load_scripts(scheduling)
        self._calls: dict[str, WireCalls] = {}
        self._pools: dict[str, PoolStore] = {}
        self._main = self.calls("default")
        fleet = FleetKeys(settings.prefix)
        self.tenants = TenantBook(fleet, self.calls(fleet.pool))
        self.allotments = AllotmentLedger(fleet, self.calls(fleet.pool))
        self.batches = BatchBook(fleet, self.calls(fleet.pool))

    def calls(self, pool: str) -> WireCalls:
        """Calls to the server that has the pool."""
        name = pool if self._servers.spread else ""
        if name not in self._calls:
            connections = self._servers.connections(PoolKeys(self.settings.prefix, pool))
            self._calls[name] = WireCalls(connections, self._scripts, self.settings.command_timeout_s, self._own_clock)
        return self._calls[name]

    @property
    def certificates(self) -> tuple[FollowedFiles[Any], ...]:
        return self._servers.certificates

    async def open(self) -> None:
        """Connect and look at the server.

        Raises:
            StoreUnavailableError: it cannot be reached.
            StoreConfigurationError: it is too old or no store at all, or refuses this client.
        """
        try:
            facts = _facts(await self._main.command("INFO"))
        except StoreUnavailableError:
            raise
        except StoreError as error:
            await self._main.command("PING")  # raises what is wrong, if it is more than INFO, which may be forbidden
            _log.warning("the store does not tell its version and memory policy, is it Redis 6.2 or newer? %s", error)
            return
        _refuse_unfit(facts)
        policy = facts.get("maxmemory_policy", "noeviction")
        if facts.get("maxmemory", "0") != "0" and policy != "noeviction":
            _log.warning("the store may evict live state: set maxmemory-policy noeviction (it is %s)", policy)
        if facts.get("cluster_enabled") == "1" and not self._servers.spread:
            _log.warning("the store is a node of a cluster: use redis+cluster:// to be served by the others, too")

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        await asyncio.gather(*(calls.close() for calls in self._calls.values()))

    def pool(self, name: str) -> PoolStore:
        if name not in self._pools:
            keys = PoolKeys(self.settings.prefix, name)
            self._pools[name] = PoolStore(name, keys, self.calls(name), self._scheduling)
        return self._pools[name]


def _refuse_unfit(facts: Mapping[str, str]) -> None:
    version = facts.get("redis_version", "")
    if version and _numbers(version) < _OLDEST_VERSION:
        raise StoreConfigurationError(f"Redis {version} is too old: use Redis 6.2 or newer, or Valkey 7.2 or newer")
    if "sentinel" in (facts.get("redis_mode"), facts.get("server_mode")):  # Redis, Valkey
        raise StoreConfigurationError("store.url names a Sentinel as the store: use redis+sentinel://HOST:PORT/MASTER")


def _facts(info: bytes) -> dict[str, str]:
    """INFO's reply as a mapping."""
    lines = info.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
