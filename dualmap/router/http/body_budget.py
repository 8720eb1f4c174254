"""How much memory the bodies of requests may take on a replica, over all clients."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from dualmap.router.errors import ReplicaFullError

UNKNOWN_CALLERS: Final = ""
"""Such requests share one part: the key that signed their tokens is being fetched."""


class BodyBudget:
    """Counts the bytes of bodies that are being read, wait, or may have to be sent once more.

    A tenant may hold ``own_bytes``, and beyond that no more than it leaves free. So it fills half of the budget, a
    second one half of the rest, and bodies of everybody else still fit, however slowly these send theirs.
    """

    def __init__(self, limit_bytes: int, *, own_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._own_bytes = own_bytes
        self._held: defaultdict[str, int] = defaultdict(int)
        """Bytes by tenant."""
        self.held_bytes = 0

    def take(self, count: int, tenant: str | None = None) -> None:
        """Count bytes that were read in the part of a tenant; None: in that of clients without one, which is all that
        is left. The caller must call ``give_back`` for them, with the same tenant.

        Raises:
            ReplicaFullError: they are too many, and were not counted.
        """
        free_bytes = self._limit_bytes - self.held_bytes - count
        if free_bytes < 0:
            raise ReplicaFullError(
                f"the bodies of requests on this replica have reached {self._limit_bytes} bytes in all; try again, or"
                " raise router.max_buffered_body_bytes",
                retry_after_s=1.0,
            )
        if tenant is not None:
            held_bytes = self._held[tenant] + count
            if held_bytes > self._own_bytes and held_bytes > free_bytes:
                raise ReplicaFullError(
                    f"the bodies of your tenant's requests on this replica have reached {held_bytes - count} bytes,"
                    " its part of what is left; try again when others have ended",
                    retry_after_s=1.0,
                )
            self._held[tenant] = held_bytes
        self.held_bytes += count

    def count(self, count: int) -> None:
        """Count bytes that reading a body takes in addition, even above the limit: reading makes room, and bodies that
        come meanwhile are refused. The caller must call ``give_back`` for them."""
        self.held_bytes += count

    def give_back(self, count: int, tenant: str | None = None) -> None:
        """Free counted bytes again."""
        self.held_bytes -= count
        if tenant is not None and count:
            left = self._held[tenant] - count
            if left:
                self._held[tenant] = left
            else:
                del self._held[tenant]
