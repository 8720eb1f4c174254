"""The calls that have no meaning without the shared store: they go to it and fail with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from statestore.base import Arrival, MigrateStatus, PoolStore, QueueSnapshot
from statestore.leases import Lease


class SharedCalls:
    """The operators' and the leader's share of ``PoolStore``, delegated."""

    def __init__(self, primary: PoolStore) -> None:
        self._primary = primary

    async def put_instance(self, spec: InstanceSpec) -> None:
        await self._primary.put_instance(spec)

    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        return await self._primary.update_instance(instance_id, changes, fence=fence)

    async def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
    ) -> bool:
        return await self._primary.set_instance_state(instance_id, state, expected=expected, fence=fence)

    async def remove_instance(self, instance_id: str) -> bool:
        return await self._primary.remove_instance(instance_id)

    async def retire(self, replica_id: str) -> None:
        await self._primary.retire(replica_id)

    async def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        return await self._primary.acquire_lease(owner, lease_ms)

    async def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        return await self._primary.renew_lease(lease, lease_ms)

    async def release_lease(self, lease: Lease) -> None:
        await self._primary.release_lease(lease)

    async def loads(self) -> Mapping[str, InstanceLoad]:
        return await self._primary.loads()

    async def queue(self, instance_id: str) -> QueueSnapshot | None:
        return await self._primary.queue(instance_id)

    async def migrate(
        self, request_id: str, source_id: str, target_id: str, *, reason: str, fence: int
    ) -> MigrateStatus:
        return await self._primary.migrate(request_id, source_id, target_id, reason=reason, fence=fence)

    async def grant_overdue(self, *, fence: int) -> int:
        return await self._primary.grant_overdue(fence=fence)

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        return await self._primary.wanted_rebalances(timeout_s)

    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        return await self._primary.arrivals(after, limit)

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int) -> int:
        return await self._primary.publish_tree(tree, counts, fence=fence)

    async def expired_replicas(self) -> Mapping[str, bool]:
        return await self._primary.expired_replicas()

    async def reap(self, replica_id: str, *, fence: int) -> int:
        return await self._primary.reap(replica_id, fence=fence)

    async def repair(self, *, fence: int) -> int:
        return await self._primary.repair(fence=fence)
