"""The state machine of one pool: the life of its requests, and what keeps them consistent.

No I/O; the time comes from ``now_ms``. Methods return what the contract in ``statestore.base`` says; grants to replicas
collect in an outbox that the caller drains after each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Generic, TypeVar

import orjson

from scheduling.chain import Chain
from scheduling.granting import CommitReply, Grant
from scheduling.instance import InstanceLoad
from scheduling.learning import Finished, FirstToken, Sample
from scheduling.placement import Observation
from scheduling.queue_order import QueueHead, QueuePlan
from scheduling.rebalance import HotQueue
from scheduling.request import Request, RequestEvent, RequestState, next_request_state
from scheduling.settings import SchedulingSettings
from statestore import base
from statestore.base import (
    NOTHING_DONE,
    Arrival,
    MigrateStatus,
    Migration,
    PoolOverview,
    PoolSnapshot,
    Transition,
)
from statestore.leases import RETIRED, Lease, ReplicaInfo
from statestore.memory.instance import InstanceBook
from statestore.memory.members import Members
from statestore.memory.prefix_index import PrefixIndex

SAMPLE_LOG = 4096
"""Entries of the sample log: some seconds of first tokens, until a new leader reads them."""


T = TypeVar("T")


class BoundedLog(Generic[T]):
    """The latest entries, numbered from 1, oldest dropped first."""

    def __init__(self, max_entries: int) -> None:
        self._entries: deque[T] = deque(maxlen=max_entries)
        self._last = 0

    def add(self, entry: T) -> None:
        self._last += 1
        self._entries.append(entry)

    def after(self, entry_id: str, limit: int) -> Sequence[tuple[str, T]]:
        """Up to ``limit`` entries after ``entry_id`` that are still in the log, oldest first."""
        first = self._last - len(self._entries) + 1
        skip = max(0, int(entry_id) + 1 - first)
        found = islice(self._entries, skip, skip + limit)
        return [(str(first + skip + index), entry) for index, entry in enumerate(found)]


class PoolState(Members):
    """One pool's whole state. Not thread-safe; every method runs to its end without giving control away."""

    def __init__(self, scheduling: SchedulingSettings, now_ms: Callable[[], int]) -> None:
        super().__init__(scheduling, now_ms)
        self.requests: dict[str, Request] = {}
        self.chains: dict[str, Chain] = {}
        """Of held requests."""
        self.migrations: dict[str, int] = {}
        self.arrival_log: BoundedLog[tuple[int, tuple[int, ...]]] = BoundedLog(scheduling.hotness_window_requests)
        self.sample_log: BoundedLog[FirstToken | Finished] = BoundedLog(SAMPLE_LOG)
        self.prefixes = PrefixIndex(scheduling.prefix_samples)
        self.observations = 0
        self._responses: tuple[dict[str, int], dict[str, int]] = {}, {}
        """Tokens of stored responses, in two generations."""
        self._outbox: list[Grant] = []

    def keep_response(self, response_id: str, tokens: int) -> None:
        new, _ = self._responses
        new[response_id] = tokens
        if len(new) >= base.STORED_RESPONSES:
            self._responses = {}, new

    def response_tokens(self, response_id: str) -> int:
        new, old = self._responses
        return new.get(response_id) or old.get(response_id, 0)

    def take_grants(self) -> Sequence[Grant]:
        """Messages to replicas since the last call, in order."""
        if not self._outbox:
            return ()
        taken, self._outbox = self._outbox, []
        return taken

    # the life of a request -------------------------------------------------------------------------------
    def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        self.observations += 1
        now_ms, books = self.now_ms(), self.instances
        loads = {
            instance_id: books[instance_id].load_now(now_ms, books[instance_id].kv.hit_blocks(chain.hashes))
            for instance_id in instance_ids
            if instance_id in books
        }
        return Observation(self.epoch, self.tree_version, self.observations, loads)

    def enter(self, book: InstanceBook, request: Request, rank_ms: int) -> None:
        """Count a request on an instance."""
        book.enter(request, rank_ms, self.now_ms())
        self.requests[request.request_id] = request
        self.changed(book)

    def commit(self, plan: QueuePlan, *, replica_id: str = "") -> CommitReply:
        book = self.instances.get(plan.instance_id)
        if book is None:
            return CommitReply()
        if book.version != plan.version:
            return CommitReply(queue=book.head(self.now_ms()))
        book.passed_over_tokens = plan.passed_over_tokens
        grants = []
        for step in plan.steps:
            request = self.requests.get(step.request_id)
            if request is None or request.state is not RequestState.HELD or request.instance_id != plan.instance_id:
                continue
            if step.deferred_to_ms is not None:
                self._defer(book, request, step.deferred_to_ms)
            else:
                grants.append(self._dispatch(book, request))
                self._tell(grants[-1], replica_id)
        self.changed(book)
        return CommitReply(tuple(grants), book.room(self.now_ms()))

    def _dispatch(self, book: InstanceBook, request: Request) -> Grant:
        """Counted again: by now requests before it may have brought its prefix."""
        now_ms, chain = self.now_ms(), self.chains.pop(request.request_id, None)
        tokens = request.uncached_tokens
        book.leave(request)
        running_requests, context_tokens = book.running_requests, book.context_tokens
        if chain is not None:
            tokens = chain.uncached_tokens(book.kv.resident_blocks(chain.hashes))
            book.stamp(chain, len(chain.hashes))
        dispatched = replace(
            request,
            state=next_request_state(request.state, RequestEvent.GRANTED),
            dispatched_ms=now_ms,
            uncached_tokens=tokens,
            deferred=False,
        )
        self.requests[request.request_id] = dispatched
        book.enter(dispatched, 0, now_ms)
        return replace(
            Grant.of(dispatched),
            deferred=request.deferred,
            running_requests=running_requests,
            context_tokens=context_tokens,
        )

    def _defer(self, book: InstanceBook, request: Request, rank_ms: int) -> None:
        book.leave(request)
        request = replace(request, deferred=True)
        self.requests[request.request_id] = request
        book.enter(request, rank_ms, self.now_ms())

    def _tell(self, grant: Grant, replica_id: str) -> None:
        if grant.replica_id != replica_id:
            self._outbox.append(grant)

    def first_token(self, request_id: str, instance_id: str, *, note: str = "") -> Transition:
        request = self.requests.get(request_id)
        if request is None or request.instance_id != instance_id or request.state is not RequestState.DISPATCHED:
            return NOTHING_DONE
        now_ms, book = self.now_ms(), self.instances[instance_id]
        state = next_request_state(request.state, RequestEvent.FIRST_TOKEN)
        prefilled = replace(request, state=state, prefilled_ms=now_ms)
        book.leave(request)
        book.enter(prefilled, 0, now_ms)
        self.requests[request_id] = prefilled
        if note:
            features = orjson.loads(note).get("features")
            self.sample_log.add(
                FirstToken(
                    instance_id,
                    request.uncached_tokens,
                    request.enqueued_ms,
                    request.dispatched_ms,
                    book.last_prefill_ms,
                    now_ms,
                    None if features is None else tuple(features),
                )
            )
        book.last_prefill_ms = now_ms
        self.changed(book)
        return Transition(True, book.room(now_ms))

    def finish(
        self, request_id: str, *, replica_id: str | None = None, attempt: int | None = None, note: str = ""
    ) -> Transition:
        request = self.requests.get(request_id)
        if request is None or replica_id not in (None, request.replica_id):
            return NOTHING_DONE
        if attempt is not None and request.attempt > attempt:
            return NOTHING_DONE
        book = self.instances[request.instance_id]
        book.leave(request)
        del self.requests[request_id]
        self.chains.pop(request_id, None)
        if note:
            self.sample_log.add(Finished.of_note(orjson.loads(note)))
        self.changed(book)
        return Transition(True, book.room(self.now_ms()))

    def records(self, request_ids: Iterable[str]) -> dict[str, Request]:
        known = self.requests
        return {request_id: known[request_id] for request_id in request_ids if request_id in known}

    def adopt(self, requests: Sequence[Request]) -> int:
        adopted = 0
        for request in requests:
            book = self.instances.get(request.instance_id)
            if book is not None and request.request_id not in self.requests:
                self.enter(book, request, self.order.rank_of(request))
                self.meet(request.replica_id)
                adopted += 1
        return adopted

    # queues and moves --------------------------------------------------------------------------------------
    def loads(self) -> dict[str, InstanceLoad]:
        now_ms = self.now_ms()
        return {instance_id: book.load_now(now_ms) for instance_id, book in sorted(self.instances.items())}

    def queue_head(self, instance_id: str) -> QueueHead | None:
        book = self.instances.get(instance_id)
        return None if book is None else book.head(self.now_ms())

    def queue(self, instance_id: str) -> HotQueue | None:
        book = self.instances.get(instance_id)
        if book is None:
            return None
        now_ms = self.now_ms()
        held = tuple(self.requests[request_id] for _, request_id in book.queue)
        others = sorted({request.alternative_id for request in held if request.alternative_id is not None})
        alternatives = {other: self.instances[other].load_now(now_ms) for other in others if other in self.instances}
        return HotQueue(now_ms, book.load_now(now_ms), held, alternatives)

    def migrate(self, request: Request, target_id: str, *, reason: str, fence: int) -> Migration:
        self.check(fence)
        now_ms, held = self.now_ms(), self.requests.get(request.request_id)
        source_id = request.instance_id
        if held is None or held.state is not RequestState.HELD or held.instance_id != source_id:
            return Migration(MigrateStatus.NOT_HELD)
        target = self.instances.get(target_id)
        if target is None or not target.takes_requests(held.leg) or target_id == source_id:
            return Migration(MigrateStatus.NOT_READY)
        if target.queued_requests >= target.spec.max_queued_requests:
            return Migration(MigrateStatus.QUEUE_FULL)
        source, chain = self.instances[source_id], self.chains.get(held.request_id)
        source.leave(held)
        there = held.prompt_tokens if chain is None else chain.uncached_tokens(target.kv.hit_blocks(chain.hashes))
        moved = held.moved(target_id, there)
        self.enter(target, moved, self.order.rank_of(moved))
        target.assigned = target.assigned.add(now_ms, there)
        self.changed(source)
        self.migrations[reason] = self.migrations.get(reason, 0) + 1
        return Migration(MigrateStatus.MIGRATED, target.room(now_ms))

    def take_wanted(self) -> Sequence[str]:
        """Each is handed out once, the oldest first; those of the same millisecond in id order."""
        taken, self.wanted = self.wanted, {}
        return sorted(taken, key=lambda instance_id: (taken[instance_id], instance_id))

    # the leader's logs and publications ---------------------------------------------------------------------
    def log_arrival(self, chain: Chain, now_ms: int) -> None:
        self.arrival_log.add((now_ms, tuple(chain.key_hashes[: self.configured.max_key_blocks])))

    def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        return [Arrival(entry_id, at_ms, head) for entry_id, (at_ms, head) in self.arrival_log.after(after, limit)]

    def samples(self, after: str, limit: int) -> Sequence[Sample]:
        return [Sample(entry_id, lesson) for entry_id, lesson in self.sample_log.after(after, limit)]

    # when processes die ---------------------------------------------------------------------------------------
    def reap(self, replica_id: str, *, fence: int | None = None) -> int:
        self.check(fence)
        lease = self.replicas.get(replica_id)
        if lease is None or lease.is_alive(self.now_ms()):
            return 0
        left = self.requests_of(replica_id)
        for request in left:
            self.finish(request.request_id)
        del self.replicas[replica_id]
        return len(left)

    def repair(self, *, fence: int | None = None) -> int:
        self.check(fence)
        repaired = 0
        for book in self.instances.values():
            if book.repair():
                self.changed(book)
                repaired += 1
        return repaired

    def requests_of(self, replica_id: str) -> Sequence[Request]:
        return self.snapshot().requests_of(replica_id)

    def snapshot(self) -> PoolSnapshot:
        requests = sorted(self.requests.values(), key=lambda request: (request.enqueued_ms, request.request_id))
        instances = self.membership().instances
        return PoolSnapshot(*self._overview(), self.epoch, self.tree_version, instances, tuple(requests))

    def overview(self) -> PoolOverview:
        return PoolOverview(*self._overview())

    def _overview(
        self,
    ) -> tuple[int, Mapping[str, InstanceLoad], tuple[ReplicaInfo, ...], Lease | None, Mapping[str, int]]:
        now_ms, known = self.now_ms(), sorted(self.replicas.items())
        replicas = tuple(each for _, each in known if each.expires_ms != RETIRED)
        return now_ms, self.loads(), replicas, self.leadership.lease(now_ms), dict(self.migrations)
