"""Leases in memory: of the leader, of router replicas, and of those who read KV events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from statestore.leases import RETIRED, Leadership, Lease, ReplicaInfo


class Leases:
    """A share of ``PoolState``."""

    now_ms: Callable[[], int]

    def __init__(self) -> None:
        self.leadership = Leadership()
        self.replicas: dict[str, ReplicaInfo] = {}
        self.subscribers: dict[str, ReplicaInfo] = {}

    # the leader ------------------------------------------------------------------------------------------
    def check(self, fence: int | None) -> None:
        """Refuse the write of a deposed leader. Raises LeaseLostError."""
        if fence is not None:
            self.leadership.check(fence, self.now_ms())

    def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        taken = self.leadership.taken(owner, lease_ms, self.now_ms())
        if taken is None:
            return None
        self.leadership = taken
        return taken.lease(self.now_ms())

    def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        self.check(lease.fence)
        self.leadership = replace(self.leadership, expires_ms=self.now_ms() + lease_ms, lease_ms=lease_ms)
        return replace(lease, expires_ms=self.leadership.expires_ms)

    def release_lease(self, lease: Lease) -> None:
        if self.leadership.fence == lease.fence:
            self.leadership = self.leadership.ended()

    # replicas --------------------------------------------------------------------------------------------
    def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        known, now_ms = self.replicas.get(replica_id), self.now_ms()
        self.replicas[replica_id] = ReplicaInfo(replica_id, now_ms + lease_ms, lease_ms, dict(info))
        return known is not None and known.beaten and known.is_alive(now_ms)

    def meet(self, replica_id: str) -> None:
        """A request of this replica was entered. A replica whose lease has expired gets a first one again: a reaper
        that is about to forget it has not seen this request."""
        known, now_ms = self.replicas.get(replica_id), self.now_ms()
        if known is None or not known.is_alive(now_ms):
            self.replicas[replica_id] = ReplicaInfo.met(replica_id, now_ms)

    def retire(self, replica_id: str) -> None:
        """The entry stays, expired, until a reaper has finished what the replica may have left."""
        if replica_id in self.replicas:
            self.replicas[replica_id] = ReplicaInfo.retired(replica_id)

    def expired_replicas(self) -> Mapping[str, bool]:
        known, now_ms = sorted(self.replicas.items()), self.now_ms()
        return {replica_id: each.expires_ms == RETIRED for replica_id, each in known if not each.is_alive(now_ms)}

    # those who read KV events ----------------------------------------------------------------------------
    def renew_subscriber(self, worker_id: str, lease_ms: int) -> Sequence[str]:
        now_ms = self.now_ms()
        self.subscribers[worker_id] = ReplicaInfo(worker_id, now_ms + lease_ms, lease_ms, {})
        self.subscribers = {name: each for name, each in self.subscribers.items() if each.is_alive(now_ms)}
        return sorted(self.subscribers)
