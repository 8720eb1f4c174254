"""What is known of one instance's KV events."""

from __future__ import annotations

from dataclasses import replace

from statestore.kv_events import BOOKING_MS, KvEventRecord, KvViewStatus


class KvEventsOf:
    """The record, the names, and the term of bookings."""

    def __init__(self, instance_id: str) -> None:
        self.record = KvEventRecord(instance_id)
        self.names: dict[bytes, bytes] = {}
        self._booked_since_ms: int | None = None

    def term_is_over(self, now_ms: int) -> bool:
        """Whether a term of bookings ended, or the first one begins; then the next one has begun."""
        if self._booked_since_ms is not None and now_ms - self._booked_since_ms < BOOKING_MS:
            return False
        self._booked_since_ms = now_ms
        return True

    def drop(self) -> None:
        """Forget how far events were read."""
        self.names.clear()
        self._booked_since_ms = None
        self.record = replace(self.record, sequence=None, published_s=0.0)

    def forget(self) -> None:
        """The same, for an instance whose cache is believed to be empty: the claim ends."""
        if self.record.fence == 0:
            return
        self.drop()
        status, reason = KvViewStatus.ESTIMATE, "the instance went down"
        self.record = replace(self.record, fence=self.record.fence + 1, status=status, reason=reason)
