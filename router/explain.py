"""Why a request went where it went: its story, and a bounded memory of those that ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from scheduling.decision import Decision
from scheduling.instance import InstanceLoad
from scheduling.legs import Leg
from scheduling.placement import Placed, PlaceStatus
from scheduling.values import value

KEPT_CANDIDATES = 8
KEPT_EXPLANATIONS = 2048
"""Of requests that ended last: a few megabytes."""


class PlacementRound:
    """One decision: what the policy saw, what it chose, and what the store replied. Worked out when it is read, which
    seldom happens."""

    __slots__ = ("_considered", "_placed", "attempt")

    def __init__(self, placed: Placed, attempt: int, considered: int = 0) -> None:
        self._placed = placed
        self.attempt = attempt
        self._considered = considered

    @classmethod
    def of(cls, placed: Placed, attempt: int) -> PlacementRound:
        """The round, cut to what is kept: policies that observe the whole fleet see hundreds of loads."""
        loads = placed.reply.loads
        if len(loads) <= KEPT_CANDIDATES:
            return cls(placed, attempt)
        decision, candidates = placed.decision, _candidates(placed)
        chosen = [name for name in (decision.instance_id, decision.alternative_id) if name is not None]
        others = (name for name in candidates if name not in chosen)
        kept = (*chosen, *islice(others, KEPT_CANDIDATES - len(chosen)))
        seen = {name: loads[name] for name in kept if name in loads}
        cut = Placed(replace(placed.reply, loads=seen), kept, (decision, placed.features))
        return cls(cut, attempt, len(candidates))

    @property
    def considered(self) -> int:
        """Candidates in all; ``candidates`` and ``loads`` keep a few of them."""
        return self._considered or len(_candidates(self._placed))

    @property
    def candidates(self) -> tuple[str, ...]:
        return _candidates(self._placed)[:KEPT_CANDIDATES]

    @property
    def loads(self) -> Mapping[str, InstanceLoad]:
        return self._placed.reply.loads

    @property
    def decision(self) -> Decision:
        return self._placed.decision

    @property
    def status(self) -> PlaceStatus:
        return self._placed.reply.status

    def told(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "candidates": self.candidates,
            "loads": {instance_id: asdict(load) for instance_id, load in self.loads.items()},
            "decision": asdict(self.decision),
            "attempt": self.attempt,
            "status": self.status,
            "considered": self.considered,
        }


def _candidates(placed: Placed) -> tuple[str, ...]:
    """Those that were asked for, and others beside them that were weighed."""
    return tuple(dict.fromkeys((*placed.candidates, *placed.reply.loads)))


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
