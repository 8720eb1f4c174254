"""What has happened to a live request so far, for people: its explanation (see ``router.explain``), and its counts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from dualmap.router.contexts_ahead import Running
from dualmap.router.decode_leg import DecodeLeg
from dualmap.router.explain import Explanation, PlacementRound
from dualmap.router.inference_request import InferenceRequest
from dualmap.router.outcome import Outcome, Usage
from dualmap.router.prompt import ReadPrompt
from dualmap.router.served_pool import ServedPool
from dualmap.scheduling.placing.placement import Placed, Search
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.legs import Leg

_UNSPLIT = (None, None, (), None)
"""Of a request without a decode leg."""


class RequestStory(ABC):
    """The part of a request that is told; what starts the same for every request is its class's until it changes."""

    request_id: str
    inference_request: InferenceRequest
    pool: ServedPool
    prompt: ReadPrompt
    chain: Chain
    slo_s: float
    instance_id: str
    attempts: int
    store_attempt: int
    leg: Leg
    decode: DecodeLeg | None
    _placed: Placed | None
    searches: list[tuple[Search, int]]
    _seen_epoch: int
    _seen_tree_version: int
    _seen_tree: HotnessTree
    _max_key_blocks: int
    _failures: tuple[str, ...] = ()
    _failed_after_s: tuple[float, ...] = ()
    placed_s: float | None = None
    _estimate: Placed | None = None
    """The last placement: its TTFT is expected, also after it was lost."""
    _spec: InstanceSpec | None = None
    """The instance that it was dispatched to."""
    _uncached_tokens = 0
    """What its instance has to prefill by its KV metadata, once it is dispatched."""
    _expected_cached: int | None = None
    """Prompt tokens that its instance is expected to find; None: not sent yet."""
    _first_token_s: float | None = None
    _prefilled_s: float | None = None
    """When its prefill leg answered."""
    _ended_s: float | None = None
    _outcome: Outcome | None = None
    _reported = Usage()
    _dispatched = False
    _held_by: Grant | None = None
    """What dispatched it, if it was held."""
    held_s = 0.0
    """Time held until the last grant."""
    _uncounted: Placed | None = None
    """The last placement, until it is counted."""

    @property
    def pool_name(self) -> str:
        return self.pool.settings.name

    @property
    @abstractmethod
    def age_s(self) -> float: ...

    @property
    def _received_unix_s(self) -> float:
        return time.time() - self.age_s

    @property
    @abstractmethod
    def _expected_s(self) -> float | None: ...

    @abstractmethod
    def _held_until_now_s(self) -> float: ...

    @property
    def expected_cached_tokens(self) -> int:
        if self._expected_cached is not None:
            return self._expected_cached
        spec, pool, chain = self._spec, self.pool, self.chain
        if spec is None:
            return 0
        cached = pool.recent_answers.cached(spec.instance_id, chain, self._uncached_tokens)
        left = pool.contexts_ahead.left(spec.instance_id, chain, cached, spec.kv_capacity_tokens, self._ran_there)
        return self.prompt.stored_tokens + left

    @property
    def _ran_there(self) -> Running | None:
        """What the store counted as running on its instance when it was dispatched."""
        if self._held_by is not None or self._estimate is None:
            return self._held_by
        reply = self._estimate.reply
        return reply if reply.instance_id == self.instance_id else None

    @property
    def rounds(self) -> tuple[PlacementRound, ...]:
        """Every decision on it."""
        return tuple(
            [PlacementRound.of(placed, attempt) for search, attempt in self.searches for placed in search.rounds]
        )

    def explain(self) -> Explanation:
        """What has happened so far."""
        chain, decode = self.chain, self.decode
        decode_id, decode_placed_s, decode_rounds, transferred = _UNSPLIT if decode is None else decode.story()
        key_blocks = self._seen_tree.key_blocks(chain, self._max_key_blocks)
        # By place: every request pays for this once, and by name it costs six times as much.
        return Explanation(
            self.request_id,
            self.inference_request.model,
            self.pool.settings.name,
            self.pool.policy.name,
            self.slo_s,
            self.prompt.tokens,
            len(chain.hashes),
            key_blocks,
            chain.prefix_hash(key_blocks),
            self._seen_tree_version,
            self._seen_epoch,
            self._received_unix_s,
            self.rounds,
            self._failures,
            self._failed_after_s,
            self.instance_id or None,
            self.placed_s,
            self._held_until_now_s() if self.attempts or self._placed else None,
            self._expected_s,
            self._first_token_s,
            self._ended_s,
            self._outcome,
            self.expected_cached_tokens,
            self._reported.cached_tokens,
            self._reported.prompt_tokens,
            self._reported.output_tokens,
            chain.block_tokens,
            chain.block_tokens * chain.key_stride,
            self.leg,
            self._prefilled_s,
            decode_id,
            decode_placed_s,
            decode_rounds,
            transferred,
        )

    # what is counted ----------------------------------------------------------------------------------------
    def count_placed(self) -> None:
        """Once for every placement: when the request is held, else when it is on its way, which counting would delay.
        Judges what the placement means, for the head of the answer too."""
        placed, metrics = self._uncounted, self.pool.metrics
        if placed is None:
            return
        self._uncounted = None
        metrics.reasons[placed.decision.reason].inc()
        (metrics.split if placed.reply.leg is Leg.PREFILL else metrics.whole).inc()
        search = self.searches[-1][0]
        (metrics.one_trip if search.trips == 1 else metrics.more_trips).inc()
        if search.stale_rounds:
            metrics.stale.inc(search.stale_rounds)
        if self.attempts <= 1 and self.placed_s is not None:
            metrics.decision_s.observe(self.placed_s)
        if self._dispatched and self._held_by is None:
            metrics.hold_s.observe(self.held_s)

    def count_reported(self, usage: Usage, prompt_tokens: int) -> None:
        """Of an answer with usage: what was expected of its prompt, beside what its instance counted."""
        self._reported, metrics = usage, self.pool.metrics
        count, tokenizer = self.prompt.count, self.pool.tokenizer
        if count is not None and tokenizer is not None:
            tokenizer.reported(count, self.chain.prompt_tokens, prompt_tokens, self.instance_id)
        metrics.compare_cached(self.expected_cached_tokens, usage.cached_tokens)
        if usage.cached_tokens is not None:
            metrics.prompt_tokens_reported.inc(prompt_tokens)
            metrics.hit_tokens_reported.inc(usage.cached_tokens)
