"""Why a request went where it went: its story, and a bounded memory of those that ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice

from scheduling.decision import Decision
from scheduling.instance import InstanceLoad
from scheduling.legs import Leg
from scheduling.placement import Placed, PlaceStatus
from scheduling.values import value

KEPT_CANDIDATES = 8
KEPT_EXPLANATIONS = 2048
"""Of requests that ended last: a few megabytes."""


@value
class PlacementRound:
    """One decision: what the policy saw, what it chose, and what the store replied."""

    candidates: tuple[str, ...]
    loads: Mapping[str, InstanceLoad]
    decision: Decision
    attempt: int
    status: PlaceStatus
    considered: int = 0
    """Candidates in all; ``candidates`` and ``loads`` keep a few of them."""

    @classmethod
    def of(cls, placed: Placed, attempt: int) -> PlacementRound:
        """The round, cut to what is kept: policies that observe the whole fleet see hundreds of loads."""
        decision, loads, status = placed.decision, placed.reply.loads, placed.reply.status
        candidates = tuple(loads)
        if candidates != placed.candidates:  # others beside them were weighed, or some of them are gone
            candidates = tuple(dict.fromkeys((*placed.candidates, *loads)))
        if len(candidates) <= KEPT_CANDIDATES:
            return cls(candidates, loads, decision, attempt, status, len(candidates))
        chosen = [name for name in (decision.instance_id, decision.alternative_id) if name is not None]
        others = (name for name in candidates if name not in chosen)
        kept = (*chosen, *islice(others, KEPT_CANDIDATES - len(chosen)))
        seen = {name: loads[name] for name in kept if name in loads}
        return cls(kept, seen, decision, attempt, status, len(candidates))


@value
class Explanation:
    """One request's story on this replica; times are seconds since it was parsed."""

    request_id: str
    model: str
    pool: str
    policy: str
    slo_s: float
    prompt_tokens: int
    chain_blocks: int
    key_blocks: int
    hash_key: int
    tree_version: int
    epoch: int
    received_unix_s: float
    rounds: tuple[PlacementRound, ...] = ()
    failures: tuple[str, ...] = ()
    failed_after_s: tuple[float, ...] = ()
    """When each of them happened."""
    instance_id: str | None = None
    """Where it was dispatched at last; differs from the decision's when it was migrated while held."""
    placed_s: float | None = None
    """When its first reservation was made."""
    held_s: float | None = None
    expected_ttft_s: float | None = None
    """By the last decision that was reserved, counted from that decision."""
    first_token_s: float | None = None
    done_s: float | None = None
    outcome: str | None = None
    expected_cached_tokens: int = 0
    reported_cached_tokens: int | None = None
    reported_prompt_tokens: int | None = None
    output_tokens: int | None = None
    """Reported."""
    block_tokens: int = 1
    """Tokens of a block of its chain."""
    key_tokens: int = 1
    """Tokens of a key block, the unit of ``key_blocks``."""
    leg: Leg = Leg.WHOLE
    """PREFILL: it was split. ``instance_id`` prefilled it, and another one answered."""
    prefilled_s: float | None = None
    """When the prefill leg had answered."""
    decode_instance_id: str | None = None
    decode_placed_s: float | None = None
    decode_rounds: tuple[PlacementRound, ...] = ()
    transferred_tokens: int | None = None
    """Of the prompt, whose KV the decode instance was not believed to hold."""


class DecisionLog:
    """The explanations of the ``limit`` requests that ended last, by request id. Live ones explain themselves."""

    def __init__(self, limit: int = KEPT_EXPLANATIONS) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, Explanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, explanation: Explanation) -> None:
        if self._limit == 0:
            return
        self._entries[explanation.request_id] = explanation
        self._entries.move_to_end(explanation.request_id)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, request_id: str) -> Explanation | None:
        return self._entries.get(request_id)

    def recent(self, limit: int) -> list[Explanation]:
        """The one that ended last comes first."""
        return list(islice(reversed(self._entries.values()), limit))
