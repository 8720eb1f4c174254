"""The members of one pool, and what is published of them, as the state machine keeps them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceSpec, InstanceState, Role
from scheduling.learned import Learned
from scheduling.queue_order import QueueOrder
from scheduling.scale_record import ScaleEntry, ScaleRecord
from scheduling.settings import SchedulingSettings, with_overrides
from statestore.base import Membership, SettingsChange
from statestore.errors import LeaseLostError
from statestore.kv_events import KvChange, KvEventRecord, KvViewStatus
from statestore.memory.instance import InstanceBook
from statestore.memory.leases import Leases
from statestore.memory.prefix_index import Ranking

EMPTY_CACHE = frozenset({InstanceState.DOWN, InstanceState.STARTING})
"""States at whose beginning an instance is believed to hold no KV blocks."""
SETTINGS_HISTORY = 1000
"""Changes of settings that are kept."""


SCALING_LOG = 1000
"""Lines of the log of scaling that are kept."""


class Members(Leases):
    """Instances, what is published of them, and settings of the running fleet."""

    def __init__(self, scheduling: SchedulingSettings, now_ms: Callable[[], int]) -> None:
        super().__init__()
        self.now_ms = now_ms
        self.epoch = 0
        self.tree_version = 0
        self.tree = HotnessTree()
        self.learned = Learned()
        self.instances: dict[str, InstanceBook] = {}
        self.least_loaded = {role: Ranking() for role in Role}
        """Ready instances, by role."""
        self.wanted: dict[str, int] = {}
        """Instances found overloaded, and since when."""
        self.configured = scheduling
        self.scheduling = scheduling
        self.order = QueueOrder.of(scheduling)
        self.overrides: dict[str, Any] = {}
        self._settings_changes: deque[SettingsChange] = deque(maxlen=SETTINGS_HISTORY)
        self._scaling = ScaleRecord()
        self._scaling_log: deque[ScaleEntry] = deque(maxlen=SCALING_LOG)

    def membership(self) -> Membership:
        specs = {instance_id: book.spec for instance_id, book in sorted(self.instances.items())}
        return Membership(self.epoch, self.tree_version, specs, self.tree, self.learned, dict(self.overrides))

    def change_settings(self, changes: Mapping[str, Any], *, by: str) -> None:
        merged = {name: given for name, given in (self.overrides | dict(changes)).items() if given is not None}
        self.scheduling = with_overrides(self.configured, merged)
        self.order = QueueOrder.of(self.scheduling)
        self.overrides = merged
        self._settings_changes.appendleft(SettingsChange(self.now_ms(), by, dict(changes)))
        self.epoch += 1

    def settings_history(self, limit: int) -> Sequence[SettingsChange]:
        return list(self._settings_changes)[:limit]

    def put_instance(self, spec: InstanceSpec) -> None:
        book = self.instances.get(spec.instance_id)
        if book is None:
            self.instances[spec.instance_id] = InstanceBook(spec)
            self.epoch += 1
            self.changed(self.instances[spec.instance_id])
            return
        self._describe(book, replace(spec, state=book.spec.state))

    def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        self.check(fence)
        book = self.instances.get(instance_id)
        if book is None:
            return False
        self._describe(book, replace(book.spec, **changes))
        return True

    def _describe(self, book: InstanceBook, spec: InstanceSpec) -> None:
        if spec != book.spec:
            self.least_loaded[book.spec.role].put(spec.instance_id, None)
            book.describe(spec)
            self.epoch += 1
            self.changed(book)

    def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
        keeps_cache: bool = False,
    ) -> bool:
        self.check(fence)
        book = self.instances.get(instance_id)
        if book is None or (expected is not None and book.spec.state is not expected):
            return False
        if state in EMPTY_CACHE and not keeps_cache:
            book.kv.clear()
            book.kv_events.forget()
        elif book.spec.state is state:
            return True
        if book.spec.state is not state:
            book.describe(replace(book.spec, state=state))
            self.epoch += 1
            if book.pending_tokens > 0:
                book.work_since_ms = self.now_ms()
        self.changed(book)
        return True

    def remove_instance(self, instance_id: str) -> bool:
        book = self.instances.get(instance_id)
        if book is None or book.requests:
            return False
        del self.instances[instance_id]
        self.least_loaded[book.spec.role].put(instance_id, None)
        self.wanted.pop(instance_id, None)
        self.epoch += 1
        return True

    def changed(self, book: InstanceBook) -> None:
        """The end of every change of a book: its version and its rank."""
        book.version += 1
        score = book.work_s(self.scheduling.kv_weight_s) if book.takes_requests() else None
        self.least_loaded[book.spec.role].put(book.spec.instance_id, score)

    # publications ----------------------------------------------------------------------------------------
    def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int | None = None) -> int:
        self.check(fence)
        if tree.hot != self.tree.hot:
            self.tree_version += 1
        self.tree = HotnessTree(dict(tree.hot))
        return self.tree_version

    def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float], *, fence: int | None = None) -> None:
        self.check(fence)
        self.learned = learned
        for instance_id, rate in tokens_per_s.items():
            if instance_id in self.instances:
                self.instances[instance_id].tokens_per_s = rate

    # scaling ------------------------------------------------------------------------------------------------
    def scaling(self) -> ScaleRecord:
        return self._scaling

    def record_scaling(self, record: ScaleRecord, entry: ScaleEntry, *, fence: int | None = None) -> None:
        self.check(fence)
        self._scaling = record
        self._scaling_log.appendleft(entry)

    def scaling_log(self, limit: int) -> Sequence[ScaleEntry]:
        return list(self._scaling_log)[:limit]

    def recent_blocks(self, instance_ids: Sequence[str], limit: int) -> Mapping[str, Sequence[int]]:
        books = self.instances
        return {name: books[name].kv.newest(limit) if name in books else () for name in instance_ids}

    # KV events -------------------------------------------------------------------------------------------
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
