"""Leadership: a lease with a fencing token."""

from __future__ import annotations

from statestore.leases import Lease, check_fence, lease_runs


class Leadership:
    """One leader at a time. Fences are taken from the clock where that is ahead of the last one, so they keep
    growing when the store comes back empty."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._lease_ms = 0
        """Length of the lease when it was taken."""
        self._last_fence = 0

    def current(self, now_ms: int) -> Lease | None:
        """The lease, if it has not run out."""
        lease = self._lease
        return lease if lease is not None and lease_runs(lease.expires_ms, self._lease_ms, now_ms) else None

    def acquire(self, owner: str, lease_ms: int, now_ms: int) -> Lease | None:
        """Lead if no owner does; the leader itself keeps its fence. None if another owner leads."""
        lease = self.current(now_ms)
        if lease is None:
            self._last_fence = max(self._last_fence + 1, now_ms)
            lease = Lease(owner, self._last_fence, 0)
        elif lease.owner != owner:
            return None
        return self._take(Lease(owner, lease.fence, now_ms + lease_ms), lease_ms)

    def renew(self, lease: Lease, lease_ms: int, now_ms: int) -> Lease:
        """Raises LeaseLostError if the lease expired or another owner leads."""
        self.check(lease.fence, now_ms)
        return self._take(Lease(lease.owner, lease.fence, now_ms + lease_ms), lease_ms)

    def _take(self, lease: Lease, lease_ms: int) -> Lease:
        self._lease, self._lease_ms = lease, lease_ms
        return lease

    def release(self, lease: Lease) -> None:
        """Step down; harmless if already lost."""
        if self._lease is not None and self._lease.fence == lease.fence:
            self._lease = None

    def check(self, fence: int, now_ms: int) -> None:
        """Raises LeaseLostError unless ``fence`` belongs to the current leader."""
        check_fence(fence, self.current(now_ms))
