"""Leases of the router replicas."""

from __future__ import annotations

from collections.abc import Mapping

from statestore.leases import RETIRED, ReplicaInfo


class ReplicaLeases:
    """Known replicas by id."""

    def __init__(self) -> None:
        self._replicas: dict[str, ReplicaInfo] = {}

    def beat(self, replica_id: str, lease_ms: int, info: Mapping[str, str], now_ms: int) -> bool:
        """Renew; False if the replica had no running lease of its own."""
        known = self._replicas.get(replica_id)
        self._replicas[replica_id] = ReplicaInfo(replica_id, now_ms + lease_ms, lease_ms, dict(info))
        return known is not None and known.beaten and known.is_alive(now_ms)

    def meet(self, replica_id: str, now_ms: int) -> None:
        """A request of this replica was entered. A replica whose lease has expired gets a first one again: a reaper
        that is about to forget it has not seen this request."""
        if not self.alive(replica_id, now_ms):
            self._replicas[replica_id] = ReplicaInfo.met(replica_id, now_ms)

    def retire(self, replica_id: str) -> None:
        """End the lease. The entry stays, expired, until a reaper has finished what the replica may have left."""
        if replica_id in self._replicas:
            self._replicas[replica_id] = ReplicaInfo.retired(replica_id)

    def forget(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)

    def alive(self, replica_id: str, now_ms: int) -> bool:
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.is_alive(now_ms)

    def expired(self, now_ms: int) -> dict[str, bool]:
        """Ids whose lease ran out or was ended, sorted, and whether it was ended."""
        known = sorted(self._replicas.items())
        return {replica_id: info.expires_ms == RETIRED for replica_id, info in known if not info.is_alive(now_ms)}

    def all(self) -> tuple[ReplicaInfo, ...]:
        """Every replica that did not retire, by id; those whose lease ran out included."""
        known = (info for info in self._replicas.values() if info.expires_ms != RETIRED)
        return tuple(sorted(known, key=lambda info: info.replica_id))
