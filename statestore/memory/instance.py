"""One instance's book: its description, its requests and counts, its KV metadata."""

from __future__ import annotations

from bisect import insort

from scheduling.chain import Chain
from scheduling.instance import InstanceLoad, InstanceSpec, kv_demand, overtaken_tokens, stalled_s
from scheduling.legs import Leg, serves
from scheduling.lifecycle import SERVING
from scheduling.load_window import LoadWindow
from scheduling.queue_order import CALM_WINDOWS, PLAN_LIMIT, QueueEntry, QueueHead, finds_memory, is_calm
from scheduling.request import Counts, Request, RequestState
from scheduling.view import is_ready
from statestore.memory.kv import KvEventsOf, KvMetadata


class InstanceBook:
    """The counts of one instance, kept equal to the sums over its requests by the methods that move them."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.tokens_per_s = spec.prefill_tokens_per_s
        self.pending_tokens = 0
        self.dispatched_tokens = 0
        self.deferred_tokens = 0
        self.passed_over_tokens = 0
        """By the last committed plan."""
        self.context_tokens = 0
        self.assigned = LoadWindow()
        self.last_prefill_ms = 0
        self.work_since_ms = 0
        """When work on time came to an instance without any, or its state changed while work was pending."""
        self.version = 0
        self.queue: list[tuple[int, str]] = []
        """Held requests by rank, then id."""
        self.requests: dict[str, Request] = {}
        """All that are held for it or running on it."""
        self.kv = KvMetadata()
        self.kv_events = KvEventsOf(spec.instance_id)

    @property
    def queued_requests(self) -> int:
        return len(self.queue)

    @property
    def running_requests(self) -> int:
        return len(self.requests) - len(self.queue)

    def takes_requests(self, leg: Leg = Leg.WHOLE) -> bool:
        """Whether new requests may be placed on the instance for this leg, or held ones moved there."""
        return is_ready(self.spec) and serves(self.spec.role, leg)

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
        had_work = self.pending_tokens > self.deferred_tokens
        self._count(request, 1)
        if not had_work and self.pending_tokens > self.deferred_tokens:
            self.work_since_ms = now_ms
        self.requests[request.request_id] = request
        if request.state is RequestState.HELD:
            insort(self.queue, (rank_ms, request.request_id))

    def leave(self, request: Request) -> None:
        """Release all that ``enter`` counted."""
        self._count(request, -1)
        del self.requests[request.request_id]
        if request.state is RequestState.HELD:
            del self.queue[next(place for place, entry in enumerate(self.queue) if entry[1] == request.request_id)]

    def _count(self, request: Request, sign: int) -> None:
        pending_tokens, dispatched_tokens, deferred_tokens, context_tokens = request.counts
        self.pending_tokens += sign * pending_tokens
        self.dispatched_tokens += sign * dispatched_tokens
        self.deferred_tokens += sign * deferred_tokens
        self.context_tokens += sign * context_tokens

    def counts(self) -> Counts:
        return Counts(self.pending_tokens, self.dispatched_tokens, self.deferred_tokens, self.context_tokens)

    def sums(self) -> Counts:
        """What the counts should be."""
        return Counts.sum(self.requests.values())

    # KV metadata -----------------------------------------------------------------------------------------
    def stamp(self, chain: Chain, resident_blocks: int) -> None:
        self.kv.stamp(chain.hashes, resident_blocks, self.spec.kv_capacity_tokens // chain.block_tokens)

    # reading ---------------------------------------------------------------------------------------------
    def load(self, now_ms: int, hit_blocks: int = 0) -> InstanceLoad:
        spec = self.spec
        has_work = self.pending_tokens > self.deferred_tokens
        return InstanceLoad(
            spec.instance_id,
            spec.state,
            self.pending_tokens,
            self.dispatched_tokens,
            self.queued_requests,
            self.running_requests,
            self.context_tokens,
            len(self.kv),
            self.assigned.read(now_ms),
            self.tokens_per_s,
            stalled_s(now_ms, self.last_prefill_ms, self.work_since_ms) if has_work else 0.0,
            spec.kv_capacity_tokens,
            hit_blocks,
            self.deferred_tokens,
            self.passed_over_tokens,
            spec.dispatch_window_tokens,
            spec.max_running_requests,
            spec.max_queued_requests,
            self.version,
        )

    def head(self, now_ms: int) -> QueueHead:
        """The head of the queue, for a planner."""
        requests = self.requests
        entries = [
            QueueEntry(request_id, rank_ms, requests[request_id].uncached_tokens)
            for rank_ms, request_id in self.queue[:PLAN_LIMIT]
        ]
        return QueueHead(now_ms, self.load(now_ms), tuple(entries))

    def room(self, now_ms: int) -> QueueHead | None:
        """The same where requests wait and one may be dispatched; else None."""
        if not self.queue:
            return None
        return self.head(now_ms) if self.has_room() or self.is_calm(0, self.queue[0][0], now_ms) else None
