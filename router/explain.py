"""Why a request went where it went: its story, and a bounded memory of those that ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

import msgspec

from dualmap.scheduling.placing.decision import Decision, Reason
from dualmap.scheduling.placing.placement import Placed, PlaceStatus
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.values import value
from dualmap.statestore.records import ToldLoads

REASONS: Mapping[Reason, str] = {
    Reason.ONLY_ONE: "it is the only candidate",
    Reason.CACHE: "its cache holds the most of the prompt",
    Reason.SLO: "the one with the larger hit would be late",
    Reason.BALANCE: "it is less loaded, and the hits are equal",
    Reason.ROTATION: "it is its turn",
    Reason.COST: "it costs least",
    Reason.BOTH_OVERLOADED: "both candidates are overloaded, and it is the less loaded one",
    Reason.BEYOND_PAIR: "it costs less than both candidates of the pair",
}
"""Why an instance was chosen, as the end of a sentence."""

KEPT_CANDIDATES = 8
KEPT_EXPLANATIONS = 2048
"""Of requests that ended last: a few megabytes."""


@value
class PlacementRound:
    """One decision: what the policy saw, what it chose, and what the store replied."""

    named: tuple[str, ...]
    """The instances that the policy asked for."""
    loads: Mapping[str, InstanceLoad]
    """Of those that were weighed or observed; a few of them where they are many."""
    decision: Decision
    attempt: int
    status: PlaceStatus
    named_in_all: int = 0
    """0: no more than are here."""

    @classmethod
    def of(cls, placed: Placed, attempt: int) -> PlacementRound:
        """The round, cut to what is kept: policies that observe the whole fleet see hundreds of loads."""
        decision, reply, named = placed.decision, placed.reply, placed.candidates
        loads = reply.loads
        if len(loads) <= KEPT_CANDIDATES:
            return cls(named, loads, decision, attempt, reply.status)
        names = _candidates(named, loads)
        chosen = [name for name in (decision.instance_id, decision.alternative_id) if name is not None]
        others = (name for name in names if name not in chosen)
        kept = (*chosen, *islice(others, KEPT_CANDIDATES - len(chosen)))
        seen = {name: loads[name] for name in kept if name in loads}
        return cls(kept, seen, decision, attempt, reply.status, len(names))

    @property
    def considered(self) -> int:
        """Candidates in all; ``candidates`` and ``loads`` keep a few of them."""
        return self.named_in_all or len(_candidates(self.named, self.loads))

    @property
    def candidates(self) -> tuple[str, ...]:
        return _candidates(self.named, self.loads)[:KEPT_CANDIDATES]

    def told(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "candidates": self.candidates,
            "loads": {instance_id: asdict(load) for instance_id, load in self.loads.items()},
            "decision": asdict(self.decision),
            "why": REASONS[self.decision.reason],
            "attempt": self.attempt,
            "status": self.status,
            "considered": self.considered,
        }


def _candidates(named: tuple[str, ...], loads: Mapping[str, InstanceLoad]) -> tuple[str, ...]:
    """Those that were asked for, and others beside them that were weighed."""
    return tuple(dict.fromkeys((*named, *loads)))


@value
class Explanation:
    """One request's record on this replica; times are seconds since it was parsed."""

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
    """The explanations of the ``limit`` requests that ended last, by request id. Live ones explain themselves.

    Each is kept as one piece of bytes: its many objects would be out of the processor's caches when they are freed.
    """

    def __init__(self, limit: int = KEPT_EXPLANATIONS) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, explanation: Explanation) -> None:
        if self._limit == 0:
            return
        self._entries[explanation.request_id] = _encoder.encode(explanation)
        self._entries.move_to_end(explanation.request_id)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, request_id: str) -> Explanation | None:
        packed = self._entries.get(request_id)
        return None if packed is None else _unpacked(packed)

    def recent(self, limit: int) -> list[Explanation]:
        """The one that ended last comes first."""
        return list(map(_unpacked, islice(reversed(self._entries.values()), limit)))


def _plain(loads: Mapping[str, InstanceLoad]) -> Any:
    """Loads that are no dictionary, for the encoder."""
    return loads.told if isinstance(loads, ToldLoads) else dict(loads)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def _unpacked(packed: bytes) -> Explanation:
    told = dict(zip(_FIELDS, msgspec.msgpack.decode(packed), strict=True))
    for name in ("rounds", "decode_rounds"):
        told[name] = tuple([_round(*each) for each in told[name]])
    texts = {name: tuple(told[name]) for name in ("failures", "failed_after_s")}
    return Explanation(**told | texts | {"leg": Leg(told["leg"])})


def _round(named: list[str], loads: Any, decision: list[Any], attempt: int, status: str, in_all: int) -> PlacementRound:
    if isinstance(loads, dict):
        seen: Mapping[str, InstanceLoad] = {
            name: InstanceLoad(name, InstanceState(state), *figures) for name, (_, state, *figures) in loads.items()
        }
    else:
        seen = ToldLoads(*loads)
    made = dict(zip(_DECISION_FIELDS, decision, strict=True))
    made["reason"] = Reason(made["reason"])
    return PlacementRound(tuple(named), seen, Decision(**made), attempt, PlaceStatus(status), in_all)


_FIELDS = [each.name for each in fields(Explanation)]
_DECISION_FIELDS = [each.name for each in fields(Decision)]
