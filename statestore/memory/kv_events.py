"""KV events in memory; see ``statestore.kv_events`` for the contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from statestore.errors import LeaseLostError
from statestore.kv_events import KvChange, KvEventRecord, KvViewStatus
from statestore.memory.instance import InstanceBook
from statestore.memory.leases import Leases


class KvEventBooks(Leases):
    """A share of ``PoolState``."""

    instances: dict[str, InstanceBook]

    def kv_event_records(self) -> Mapping[str, KvEventRecord]:
        return {instance_id: book.kv_events.record for instance_id, book in sorted(self.instances.items())}

    def claim_kv_events(self, instance_id: str, worker_id: str) -> KvEventRecord | None:
        book = self.instances.get(instance_id)
        if book is None:
            return None
        events = book.kv_events
        owner = self.subscribers.get(events.record.owner)
        if owner is not None and owner.replica_id != worker_id and owner.is_alive(self.now_ms()):
            return None
        fence = max(events.record.fence + 1, self.now_ms())
        events.record = replace(events.record, owner=worker_id, fence=fence)
        return events.record

    def release_kv_events(self, instance_id: str, fence: int) -> None:
        book = self.instances.get(instance_id)
        if book is not None and book.kv_events.record.fence == fence:
            book.kv_events.record = replace(book.kv_events.record, owner="")

    def mark_kv_events(
        self, instance_id: str, fence: int, status: KvViewStatus, reason: str = "", *, drop: bool = False
    ) -> None:
        book = self._claimed(instance_id, fence)
        if drop:
            book.kv.clear()
            book.kv_events.drop()
        book.kv_events.record = replace(book.kv_events.record, status=status, reason=reason)

    def kv_names(self, instance_id: str) -> Mapping[bytes, bytes]:
        book = self.instances.get(instance_id)
        return {} if book is None else dict(book.kv_events.names)

    def apply_kv_events(self, instance_id: str, fence: int, change: KvChange) -> int:
        book = self._claimed(instance_id, fence)
        events = book.kv_events
        booked = book.kv.confirm(change.stored)
        book.kv.remove(change.removed)
        if change.all_names:
            events.names.clear()
        for name, known in change.names.items():
            if known:
                events.names[name] = known
            else:
                events.names.pop(name, None)
        events.record = replace(events.record, sequence=change.sequence, published_s=change.published_s)
        if events.record.status is KvViewStatus.EXACT and events.term_is_over(self.now_ms()):
            book.kv.end_term()
        return booked

    def _claimed(self, instance_id: str, fence: int) -> InstanceBook:
        book = self.instances.get(instance_id)
        if book is None or fence == 0 or book.kv_events.record.fence != fence:
            raise LeaseLostError(f"fence {fence} is no longer the claim of these KV events: claim them again")
        return book
