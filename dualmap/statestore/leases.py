"""The leases of leaders and replicas, and when one has run out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

RETIRED = 0
"""Expiry of a replica's lease that its owner ended."""
FIRST_LEASE_MS = 10_000
"""A replica that has requests but no running lease is given this long, so that none is without a lease."""


def lease_runs(expires_ms: int, lease_ms: int, now_ms: int) -> bool:
    """Whether a lease with this end and this length is valid now.

    One with more than twice its length left was taken before the store's clock was set back. It has expired as well;
    otherwise a dead owner would keep it until the clock has caught up. A step back of less than the length ends no
    lease: a living owner renews its lease soon, a dead one's lasts that much longer. The Lua twin is
    ``shared/leases.lua``.
    """
    return 0 < expires_ms - now_ms <= 2 * lease_ms


LOST_FIELD: Final = "lost"
"""Field of a replica's information with the instances that it cannot reach, or that fail all its requests, by id."""
AVOIDED_FIELD: Final = "avoids"
"""Field of a replica's information with the instances that it sends nothing, or trial requests alone, and why."""
OVERDUE_FIELD: Final = "overdue"
"""Field of a replica's information with the number of its requests whose deadline has passed without a first token."""
REFUSALS_FIELD: Final = "refusals"
"""Field with the number of errors that the replica has answered since it began, as ``code=count`` pairs."""
FAULTS_FIELD: Final = "faults"
"""Field with the number of faults that it has seen since it began, as ``instance/reason=count`` pairs; the
most of them where they are many."""
LIMITED_FIELD: Final = "limited"
"""Field with the number of requests that limits of tenants have kept out since the replica began, as
``tenant/limit=count`` pairs; the most of them where they are many."""
SHADOWS_FIELD: Final = "shadows"
"""The same of copies of requests, and of those that they are copies of."""
REVISIONS_FIELD: Final = "revisions"
"""Field of a heartbeat with the figures of revisions (``scheduling.revisions.figures``), where these have weights."""
WAITING_FIELD: Final = "waiting"
"""Field of a replica's information with the number of its requests that wait for the first instance of the pool. With
the two below, of a pool that may have no instance."""
LIVE_FIELD: Final = "live"
"""Field with the number of requests of the pool that it serves now."""
ENDED_FIELD: Final = "ended"
"""Field with the number of those that it has served since it began."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A held leadership. ``fence`` grows with every new leader; writes under an older one are refused."""

    owner: str
    fence: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class Leadership:
    """The leadership of a pool, as a store keeps it."""

    owner: str = ""
    fence: int = 0
    """The last one that was given. It stays when its owner steps down, so that the next one is higher."""
    expires_ms: int = 0
    lease_ms: int = 0
    """Length of the lease when it was taken."""
    schema: int = 0
    """The schema of the leader's version (``statestore.pool.schema``)."""

    def lease(self, now_ms: int) -> Lease | None:
        """The leader's, if it has not run out."""
        runs = self.owner and lease_runs(self.expires_ms, self.lease_ms, now_ms)
        return Lease(self.owner, self.fence, self.expires_ms) if runs else None

    def taken(self, owner: str, lease_ms: int, now_ms: int, schema: int = 0) -> Leadership | None:
        """The leadership once this owner took it; None if another one leads. The present leader keeps its fence."""
        led = self.lease(now_ms)
        if led is not None and led.owner != owner:
            return None
        # The clock is used where it is ahead, so that the fence grows even over a lost store.
        fence = max(self.fence + 1, now_ms) if led is None else led.fence
        return Leadership(owner, fence, now_ms + lease_ms, lease_ms, schema)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica as the store knows it."""

    replica_id: str
    expires_ms: int
    lease_ms: int
    """Length of the lease when it was taken."""
    info: Mapping[str, str]
    """Free text fields for people: address, process id, version, request counts."""
    beaten: bool = True
    """Whether its owner renewed it: a replica that is first seen by a request of its own is not yet known as alive."""
    schema: int = 0
    """The schema of its version (``statestore.pool.schema``)."""

    @classmethod
    def first_seen(cls, replica_id: str, now_ms: int) -> ReplicaInfo:
        """A first lease."""
        return cls(replica_id, now_ms + FIRST_LEASE_MS, FIRST_LEASE_MS, {}, beaten=False)

    @classmethod
    def retired(cls, replica_id: str) -> ReplicaInfo:
        return cls(replica_id, RETIRED, 0, {}, beaten=False)

    def is_alive(self, now_ms: int) -> bool:
        return lease_runs(self.expires_ms, self.lease_ms, now_ms)
