"""A store of one process, without any server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from dualmap.runtime.certificates import FollowedFiles
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.steps import at_once
from dualmap.statestore.batches.batch_book import BatchBook
from dualmap.statestore.call_values import Membership
from dualmap.statestore.keys import FleetKeys, PoolKeys
from dualmap.statestore.memory.calls import MemoryCalls
from dualmap.statestore.memory.server import MemoryServer
from dualmap.statestore.pool.pool_store import PoolStore
from dualmap.statestore.pool.scripts import load_scripts
from dualmap.statestore.tenants.allotment_ledger import AllotmentLedger
from dualmap.statestore.tenants.tenant_book import TenantBook


def wall_clock_ms() -> int:
    """The time that Redis ``TIME`` would reply on this machine."""
    return time.time_ns() // 1_000_000


class MemoryStore:
    """Pools by name, gone with the process."""

    certificates: tuple[FollowedFiles[Any], ...] = ()

    def __init__(
        self, scheduling: SchedulingSettings, *, now_ms: Callable[[], int] = wall_clock_ms, prefix: str = "dualmap"
    ) -> None:
        self._scheduling = scheduling
        self._prefix = prefix
        self.server = MemoryServer()
        self._calls = MemoryCalls(self.server, load_scripts(scheduling), now_ms)
        self._pools: dict[str, PoolStore] = {}
        self.tenants = TenantBook(FleetKeys(prefix), self._calls)
        self.allotments = AllotmentLedger(FleetKeys(prefix), self._calls)
        self.batches = BatchBook(FleetKeys(prefix), self._calls)

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to disconnect from."""

    def pool(self, name: str) -> PoolStore:
        if name not in self._pools:
            self._pools[name] = PoolStore(name, PoolKeys(self._prefix, name), self._calls, self._scheduling)
        return self._pools[name]

    def pool_of(self, name: str, known: Membership, tokens_per_s: Mapping[str, float]) -> PoolStore:
        """A pool with these members, at their versions, and with the prefill rates of some."""
        pool, meta = self.pool(name), PoolKeys(self._prefix, name).meta
        at_once(_enter(pool, known, tokens_per_s))
        # Versions are entered as a replica knows them, so that it keeps its view instead of requesting a newer one.
        self.server.run(b"HSET", meta, b"epoch", known.epoch, b"tree_version", known.tree_version)
        return pool


async def _enter(pool: PoolStore, known: Membership, tokens_per_s: Mapping[str, float]) -> None:
    """Give a new pool these members."""
    await pool.members.enter_all(known.instances.values())
    for each, kind in known.names.items():
        await pool.members.add_name(each, kind)
    await pool.adapters.restore(known.adapters)
    await pool.settings.restore(known.overrides)
    lease = await pool.leader_lease.acquire("its only process", 60_000)
    assert lease is not None  # the pool is new
    await pool.publications.publish_tree(known.tree, {}, fence=lease.fence)
    await pool.publications.publish_learned(known.learned, tokens_per_s, fence=lease.fence)
