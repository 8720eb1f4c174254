"""One instance's book: its description, its requests and counts, its KV metadata."""

from __future__ import annotations

from bisect import insort

from scheduling.chain import Chain
from scheduling.instance import InstanceLoad, InstanceSpec, kv_demand, overtaken_tokens
from scheduling.lifecycle import SERVING
from scheduling.load_window import LoadWindow
from scheduling.queue_order import CALM_WINDOWS, PLAN_LIMIT, QueueEntry, QueueHead, finds_memory, is_calm
from scheduling.request import Counts, Request, RequestState
from statestore.memory.kv import KvEventsOf, KvMetadata
from statestore.records import InstanceRecord, described


class InstanceBook(InstanceRecord):
    """The counts of one instance, kept equal to the sums over its requests by the methods that move them."""

    def __init__(self, spec: InstanceSpec) -> None:
        super().__init__(**described(spec), tokens_per_s=spec.prefill_tokens_per_s)
        self.spec = spec
        self.assigned = LoadWindow()
        self.queue: list[tuple[int, str]] = []
        """Held requests by rank, then id."""
        self.requests: dict[str, Request] = {}
        """All that are held for it or running on it."""
        self.kv = KvMetadata()
        self.kv_events = KvEventsOf(spec.instance_id)

    def describe(self, spec: InstanceSpec) -> None:
        self.spec = spec
        for name, each in described(spec).items():
            setattr(self, name, each)

    def has_room(self, windows: int = 1) -> bool:
        """Whether one more request may be dispatched, into so many dispatch windows."""
        return self.may_run() and self.dispatched_tokens < windows * self.spec.dispatch_window_tokens

    def may_run(self) -> bool:
        """Whether it serves, and fewer requests run than it takes."""
        return self.spec.state in SERVING and self.running_requests < self.spec.max_running_requests

    def finds_memory(self, tokens: int) -> bool:
        """Whether KV memory does not keep a request with so many tokens to prefill from being dispatched."""
        return finds_memory(tokens, self.running_requests, self.context_tokens, self.spec.kv_capacity_tokens)

    def is_calm(self, tokens: int, deadline_ms: int, now_ms: int) -> bool:
        """Whether one more may be dispatched as no deadline is at stake, so many more tokens of work included."""
        if self.deferred_tokens > 0 or not self.has_room(CALM_WINDOWS):
            return False
        return is_calm(self.pending_tokens + tokens, self.tokens_per_s, now_ms, deadline_ms)

    def work_s(self, kv_weight_s: float) -> float:
        """Its load in seconds, by which the least loaded are ranked."""
        overtaken = overtaken_tokens(
            self.pending_tokens, self.dispatched_tokens, self.deferred_tokens, self.passed_over_tokens
        )
        ahead_s = (self.pending_tokens - overtaken) / self.tokens_per_s
        return ahead_s + kv_weight_s * kv_demand(self.context_tokens, self.spec.kv_capacity_tokens)

    # counting --------------------------------------------------------------------------------------------
    def enter(self, request: Request, rank_ms: int, now_ms: int) -> None:
        """Count a request in the state that it is in, listed with that rank where it is held."""
        counts = request.counts
        if self.begins_work(counts):
            self.work_since_ms = now_ms
        self._count(counts, 1)
        self.requests[request.request_id] = request
        if request.state is RequestState.HELD:
            insort(self.queue, (rank_ms, request.request_id))

    def leave(self, request: Request) -> None:
        """Release all that ``enter`` counted."""
        self._count(request.counts, -1)
        del self.requests[request.request_id]
        if request.state is RequestState.HELD:
            del self.queue[next(place for place, entry in enumerate(self.queue) if entry[1] == request.request_id)]

    def _count(self, counts: Counts, sign: int) -> None:
        self.pending_tokens += sign * counts.pending_tokens
        self.dispatched_tokens += sign * counts.dispatched_tokens
        self.deferred_tokens += sign * counts.deferred_tokens
        self.context_tokens += sign * counts.context_tokens
        self.queued_requests += sign * counts.queued_requests
        self.running_requests += sign * counts.running_requests

    def repair(self) -> bool:
        """Whether the counts were not the sums that they are now."""
        sums = Counts.sum(self.requests.values())._asdict()
        wrong = {name: each for name, each in sums.items() if each != getattr(self, name)}
        for name, each in wrong.items():
            setattr(self, name, each)
        return bool(wrong)

    # KV metadata -----------------------------------------------------------------------------------------
    def stamp(self, chain: Chain, resident_blocks: int) -> None:
        self.kv.stamp(chain.hashes, resident_blocks, self.spec.kv_capacity_tokens // chain.block_tokens)

    # reading ---------------------------------------------------------------------------------------------
    def load_now(self, now_ms: int, hit_blocks: int = 0) -> InstanceLoad:
        return self.load(self.spec.instance_id, now_ms, hit_blocks, len(self.kv), self.assigned.read(now_ms))

    def head(self, now_ms: int) -> QueueHead:
        """The head of the queue, for a planner."""
        requests = self.requests
        entries = [
            QueueEntry(request_id, rank_ms, requests[request_id].uncached_tokens)
            for rank_ms, request_id in self.queue[:PLAN_LIMIT]
        ]
        return QueueHead(now_ms, self.load_now(now_ms), tuple(entries))

    def room(self, now_ms: int) -> QueueHead | None:
        """The same where requests wait and one may be dispatched; else None."""
        if not self.queue:
            return None
        return self.head(now_ms) if self.has_room() or self.is_calm(0, self.queue[0][0], now_ms) else None
