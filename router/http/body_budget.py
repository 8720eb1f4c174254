"""How much memory the bodies of requests may take on a replica, over all clients."""

from __future__ import annotations

from dualmap.router.errors import ReplicaFullError


class BodyBudget:
    """Counts the bytes of bodies that are being read, wait, or may have to be sent once more."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """Count bytes that were read; the caller must call ``give_back`` for them.

        Raises:
            ReplicaFullError: they are too many, and were not counted.
        """
        if self.held_bytes + count > self._limit_bytes:
            raise ReplicaFullError(
                f"the bodies of requests on this replica have reached {self._limit_bytes} bytes in all; try again, or"
                " raise router.max_buffered_body_bytes",
                retry_after_s=1.0,
            )
        self.held_bytes += count

    def count(self, count: int) -> None:
        """Count bytes that reading a body takes in addition, even above the limit: reading makes room, and bodies that
        come meanwhile are refused. The caller must call ``give_back`` for them."""
        self.held_bytes += count

    def give_back(self, count: int) -> None:
        """Free counted bytes again."""
        self.held_bytes -= count
