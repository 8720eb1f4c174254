"""One instance's account: what it is, what was sent to it, what it holds."""

from __future__ import annotations

from dataclasses import replace

from scheduling.chain import Chain
from scheduling.instance import InstanceLoad, InstanceSpec, kv_demand
from scheduling.lifecycle import SERVING
from scheduling.load_window import LoadWindow
from scheduling.overdue_work import OverdueWork
from scheduling.prefill_rate import PrefillRate, prefill_busy_s
from scheduling.queue_order import behind_tokens
from scheduling.ttft import work_s
from scheduling.ttft_model import TtftModel
from scheduling.view import is_scheduled
from statestore.base import RequestState
from statestore.ledger.kv import KvMetadata
from statestore.ledger.live import HeldQueue, LiveRequest, Rank, by_sequence


class InstanceAccount:
    """The sums of one instance, kept equal to the sums over its requests by the methods that move them."""

    __slots__ = (
        "aside_tokens",
        "context_tokens",
        "dispatched_tokens",
        "kv",
        "last_prefill_ms",
        "late",
        "late_tokens",
        "overdue",
        "pending_tokens",
        "queue",
        "rate",
        "running",
        "spec",
        "ttft_model",
        "window",
        "work_since_ms",
    )

    def __init__(self, spec: InstanceSpec, rank: Rank = by_sequence) -> None:
        self.spec = spec
        self.pending_tokens = 0
        self.dispatched_tokens = 0
        self.late_tokens = 0
        self.aside_tokens = 0
        """Of queued requests that the last plan set aside, see ``scheduling.queue_order``."""
        self.context_tokens = 0
        self.window = LoadWindow()
        self.rate = PrefillRate.prior(spec.prefill_tokens_per_s)
        self.ttft_model = TtftModel()
        self.last_prefill_ms = 0
        self.work_since_ms = 0
        """When work that is not late came to an instance without any, or its state changed while work was pending."""
        self.queue = HeldQueue(rank)
        self.late = HeldQueue(by_sequence)
        """Held requests that stepped behind, see ``scheduling.queue_order``."""
        self.overdue = OverdueWork()
        self.running: dict[str, LiveRequest] = {}
        self.kv = KvMetadata()

    @property
    def held_requests(self) -> int:
        return len(self.queue) + len(self.late)

    @property
    def on_time_tokens(self) -> int:
        """Pending tokens but for those of held requests that stepped behind: what the instance is to prefill now."""
        return self.pending_tokens - self.late_tokens

    @property
    def kv_demand(self) -> float:
        """See ``InstanceLoad.kv_demand``."""
        return kv_demand(self.context_tokens, self.spec.kv_capacity_tokens)

    def takes_requests(self) -> bool:
        """Whether new requests may be placed on the instance, or held ones moved there."""
        return is_scheduled(self.spec)

    def serves(self) -> bool:
        """Whether the instance is given its held requests at all."""
        return self.spec.state in SERVING

    def has_room(self, windows: int = 1) -> bool:
        """Whether one more request may be dispatched, with so many dispatch windows to fill."""
        spec = self.spec
        return (
            spec.state in SERVING
            and self.dispatched_tokens < windows * spec.dispatch_window_tokens
            and len(self.running) < spec.max_running_requests
        )

    def enter(self, request: LiveRequest, now_ms: int) -> None:
        """Count a request in the state it is in."""
        is_held = request.state is RequestState.HELD
        if request.state is not RequestState.PREFILLED:
            if not (is_held and request.late):
                self._work_comes(now_ms)
            self.pending_tokens += request.uncached_tokens
        if is_held:
            self._list(request)
            return
        if request.state is RequestState.DISPATCHED:
            self.dispatched_tokens += request.uncached_tokens
        self.context_tokens += request.context_tokens
        self.running[request.request_id] = request

    def _work_comes(self, now_ms: int) -> None:
        if self.on_time_tokens == 0:
            self.work_since_ms = now_ms

    def leave(self, request: LiveRequest) -> None:
        """Release all that ``enter`` and the transitions since then counted."""
        if request.state is not RequestState.PREFILLED:
            self.pending_tokens -= request.uncached_tokens
        if request.state is RequestState.HELD:
            self._delist(request)
            return
        if request.state is RequestState.DISPATCHED:
            self.dispatched_tokens -= request.uncached_tokens
        self.context_tokens -= request.context_tokens
        del self.running[request.request_id]

    def _list(self, request: LiveRequest) -> None:
        if request.late:
            self.late.push(request)
            self.late_tokens += request.uncached_tokens
        else:
            self.queue.push(request)

    def _delist(self, request: LiveRequest) -> None:
        if request.late:
            self.late.remove(request)
            self.late_tokens -= request.uncached_tokens
        else:
            self.queue.remove(request)

    def step_behind(self, request: LiveRequest, *, surplus: bool) -> None:
        """Let a queued request wait among the late ones from now on."""
        self._delist(request)
        request.late, request.surplus = True, surplus
        self._list(request)

    def set_clock_back(self, now_ms: int) -> None:
        """No time lies ahead of the clock any more: held requests wait from now on, and a stall begins now."""
        for request in [held for held in (*self.queue, *self.late) if held.enqueued_ms > now_ms]:
            self._delist(request)
            request.enqueued_ms = now_ms
            self._list(request)
        self.overdue = replace(self.overdue, at_ms=min(self.overdue.at_ms, now_ms))
        self.last_prefill_ms = min(self.last_prefill_ms, now_ms)
        self.work_since_ms = min(self.work_since_ms, now_ms)

    def position(self, request: LiveRequest) -> int:
        """Held requests ahead of this held one, as long as nobody comes or steps behind."""
        if request.late:
            return len(self.queue) + self.late.position(request)
        return self.queue.position(request)

    def recount(self, request: LiveRequest) -> None:
        """Count a held request's uncached tokens by what the instance has been given until now.

        It was placed by what was promised: whoever brings the prefix may be held behind it, or gone by now.
        """
        if request.chain is None:
            return
        uncached_tokens = self.uncached_tokens_now(request, request.chain)
        more_tokens = uncached_tokens - request.uncached_tokens
        request.uncached_tokens = uncached_tokens
        self.pending_tokens += more_tokens
        if request.late:
            self.late_tokens += more_tokens

    def uncached_tokens_now(self, request: LiveRequest, chain: Chain) -> int:
        """Uncached tokens of a request by what the instance has been given; its count until now is the guess."""
        guess = (request.prompt_tokens - request.uncached_tokens) // chain.block_tokens
        given = min(self.kv.given_blocks(chain.hashes, guess), self._capacity_blocks(chain))
        return chain.uncached_tokens(given)

    def dispatch(self, request: LiveRequest, now_ms: int) -> None:
        """Count a request that ``enter`` counted as held as the instance's own from now on."""
        self.recount(request)
        if request.late:
            self._work_comes(now_ms)
        self._delist(request)
        if request.chain is not None:
            self.give(request.chain)
            request.chain = None
        request.state = RequestState.DISPATCHED
        request.dispatched_ms = now_ms
        self.dispatched_tokens += request.uncached_tokens
        self.context_tokens += request.context_tokens
        self.running[request.request_id] = request

    def prefilled(self, request: LiveRequest, now_ms: int, *, seen: bool) -> None:
        """Release a dispatched request's pending tokens and stamp the prefill clock; learn, if it was seen."""
        self.pending_tokens -= request.uncached_tokens
        self.dispatched_tokens -= request.uncached_tokens
        if seen:
            self._learn(request, now_ms)
        self.last_prefill_ms = now_ms
        request.state = RequestState.PREFILLED
        request.prefilled_ms = now_ms

    def _learn(self, request: LiveRequest, now_ms: int) -> None:
        busy_s = prefill_busy_s(now_ms, self.last_prefill_ms, request.dispatched_ms)
        self.rate = self.rate.after(request.uncached_tokens, busy_s)
        if request.ttft_features is not None and not request.late:
            ttft_s = max(0, now_ms - request.enqueued_ms) / 1000
            self.ttft_model = self.ttft_model.after(request.ttft_features, ttft_s)

    def promise(self, chain: Chain) -> None:
        """Believe that the instance will hold the chain, as far as its cache can."""
        self.kv.promise(chain.hashes, self._capacity_blocks(chain))

    def give(self, chain: Chain) -> None:
        """Believe that the instance holds the chain before it computes anything else."""
        self.kv.give(chain.hashes, self._capacity_blocks(chain))

    def _capacity_blocks(self, chain: Chain) -> int:
        return self.spec.kv_capacity_tokens // chain.block_tokens

    def sums(self) -> tuple[int, int, int, int]:
        """Pending, dispatched, late and context tokens as they should be: summed over the requests."""
        late = sum(request.uncached_tokens for request in self.late)
        held = late + sum(request.uncached_tokens for request in self.queue)
        dispatched = sum(
            request.uncached_tokens for request in self.running.values() if request.state is RequestState.DISPATCHED
        )
        context = sum(request.context_tokens for request in self.running.values())
        return held + dispatched, dispatched, late, context

    def work_s(self, kv_weight_s: float) -> float:
        """See ``scheduling.ttft.work_s``."""
        ahead_tokens = self.pending_tokens - self._behind_tokens()
        return work_s(ahead_tokens, self.rate.tokens_per_s, self.kv_demand, kv_weight_s)

    def _behind_tokens(self) -> int:
        return behind_tokens(self.pending_tokens, self.dispatched_tokens, self.late_tokens, self.aside_tokens)

    def load(self, now_ms: int, hit_blocks: int = 0) -> InstanceLoad:
        spec = self.spec
        stalled_ms = now_ms - max(self.last_prefill_ms, self.work_since_ms) if self.on_time_tokens > 0 else 0
        return InstanceLoad(
            spec.instance_id,
            spec.state,
            self.pending_tokens,
            self.dispatched_tokens,
            len(self.queue) + len(self.late),
            len(self.running),
            self.context_tokens,
            len(self.kv),
            self.window.read(now_ms),
            self.rate.tokens_per_s,
            max(0, stalled_ms) / 1000,
            spec.kv_capacity_tokens,
            hit_blocks,
            self._behind_tokens(),
            self.ttft_model.weights,
        )
