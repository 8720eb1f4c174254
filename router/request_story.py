"""What has happened to a live request so far, for people: see ``router.explain``."""

from __future__ import annotations

from abc import ABC, abstractmethod

from router.decode_leg import DecodeLeg
from router.explain import Explanation, PlacementRound
from router.inference_request import InferenceRequest
from router.outcome import Outcome, Usage
from router.served_pool import ServedPool
from scheduling.chain import Chain
from scheduling.hotness import HotnessTree
from scheduling.legs import Leg
from scheduling.placement import Placed


class RequestStory(ABC):
    """The part of a request that is told; what starts the same for every request is its class's until it changes."""

    request_id: str
    inference_request: InferenceRequest
    pool: ServedPool
    chain: Chain
    slo_s: float
    instance_id: str
    attempts: int
    store_attempt: int
    expected_cached_tokens: int
    leg: Leg
    decode: DecodeLeg | None
    _placed: Placed | None
    _rounds: list[tuple[Placed, int]]
    _seen_epoch: int
    _seen_tree_version: int
    _seen_tree: HotnessTree
    _max_key_blocks: int
    _failures: tuple[str, ...] = ()
    _failed_after_s: tuple[float, ...] = ()
    placed_s: float | None = None
    _estimate: Placed | None = None
    """The last placement: its TTFT is expected, also after it was lost."""
    _first_token_s: float | None = None
    _prefilled_s: float | None = None
    """When its prefill leg answered."""
    _ended_s: float | None = None
    _outcome: Outcome | None = None
    _reported = Usage()

    @property
    def pool_name(self) -> str:
        return self.pool.settings.name

    @property
    @abstractmethod
    def _received_unix_s(self) -> float: ...

    @property
    @abstractmethod
    def _expected_s(self) -> float | None: ...

    @abstractmethod
    def _held_until_now_s(self) -> float: ...

    def note_round(self, placed: Placed) -> None:
        self._rounds.append((placed, self.store_attempt))

    @property
    def rounds(self) -> tuple[PlacementRound, ...]:
        """Every decision on it."""
        return tuple([PlacementRound.of(placed, attempt) for placed, attempt in self._rounds])

    def explain(self) -> Explanation:
        """What has happened so far."""
        chain = self.chain
        key_blocks = self._seen_tree.key_blocks(chain, self._max_key_blocks)
        return Explanation(
            request_id=self.request_id,
            model=self.inference_request.model,
            pool=self.pool_name,
            policy=self.pool.policy.name,
            slo_s=self.slo_s,
            prompt_tokens=chain.prompt_tokens,
            chain_blocks=len(chain.hashes),
            key_blocks=key_blocks,
            hash_key=chain.prefix_hash(key_blocks),
            tree_version=self._seen_tree_version,
            epoch=self._seen_epoch,
            received_unix_s=self._received_unix_s,
            rounds=self.rounds,
            failures=self._failures,
            failed_after_s=self._failed_after_s,
            instance_id=self.instance_id or None,
            placed_s=self.placed_s,
            held_s=self._held_until_now_s() if self.attempts or self._placed else None,
            expected_ttft_s=self._expected_s,
            first_token_s=self._first_token_s,
            done_s=self._ended_s,
            outcome=self._outcome,
            expected_cached_tokens=self.expected_cached_tokens,
            reported_cached_tokens=self._reported.cached_tokens,
            reported_prompt_tokens=self._reported.prompt_tokens,
            output_tokens=self._reported.output_tokens,
            block_tokens=chain.block_tokens,
            key_tokens=chain.block_tokens * chain.key_stride,
            leg=self.leg,
            prefilled_s=self._prefilled_s,
            **({} if self.decode is None else self.decode.story()),
        )
