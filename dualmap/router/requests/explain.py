"""Why a request went where it went: its explanation, and a bounded memory of those that ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from itertools import islice
from typing import Any, Final, Protocol

import msgspec

from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.tenants.rate_limits import limits_told
from dualmap.scheduling.placing.decision import Decision, Reason
from dualmap.scheduling.placing.placement import Placed, PlaceStatus
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.machine import RequestMachine
from dualmap.scheduling.request.outcome import Usage
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.tenants.classes import class_band
from dualmap.scheduling.tenants.shares import Standing
from dualmap.scheduling.values import value
from dualmap.statestore.records import ReportedLoads

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
"""The reason for an instance, as the end of a sentence."""

KEPT_CANDIDATES = 8
KEPT_EXPLANATIONS = 2048
"""Explanations that are kept, of the requests that ended last: a few megabytes."""


@value
class PlacementRound:
    """One decision: what the policy saw, what it chose, and what the store replied."""

    named: tuple[str, ...]
    """The instances that the policy asked for."""
    loads: Mapping[str, InstanceLoad]
    """The loads of the instances that were weighed or observed; a few of them where they are many."""
    decision: Decision
    attempt: int
    status: PlaceStatus
    named_in_all: int = 0
    """0: no more than are here."""
    placed_ms: int = 0
    """The time of the store's reply."""
    enqueued_ms: int = 0
    """The first reservation of the request."""

    @classmethod
    def of(cls, placed: Placed, attempt: int) -> PlacementRound:
        """The round, cut to what is kept: policies that observe the whole fleet see hundreds of loads."""
        decision, reply = placed.decision, placed.reply
        named, loads = placed.candidates, reply.loads
        if len(loads) <= KEPT_CANDIDATES:
            return cls(named, loads, decision, attempt, reply.status, 0, reply.now_ms, reply.enqueued_ms)
        names = _candidates(named, loads)
        chosen = [name for name in (decision.instance_id, decision.alternative_id) if name is not None]
        others = (name for name in names if name not in chosen)
        kept = (*chosen, *islice(others, KEPT_CANDIDATES - len(chosen)))
        seen = {name: loads[name] for name in kept if name in loads}
        return cls(kept, seen, decision, attempt, reply.status, len(names), reply.now_ms, reply.enqueued_ms)

    @property
    def considered(self) -> int:
        """Candidates in all; ``candidates`` and ``loads`` keep a few of them."""
        return self.named_in_all or len(_candidates(self.named, self.loads))

    @property
    def candidates(self) -> tuple[str, ...]:
        return _candidates(self.named, self.loads)[:KEPT_CANDIDATES]

    def told(self) -> dict[str, Any]:
        """Return it as plain values."""
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
    """The instances that the policy named, and others beside them that were weighed."""
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
    """The time of each failure."""
    instance_id: str | None = None
    """Where it was dispatched at last; differs from the decision's when it was migrated while held."""
    placed_s: float | None = None
    """Its age when its first reservation was made."""
    held_s: float | None = None
    expected_ttft_s: float | None = None
    """The TTFT that the last decision which was reserved expected, counted from that decision."""
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
    """Its age when the prefill leg had answered."""
    client: str | None = None
    """Name of the verified certificate that the client showed; None without one."""
    continued: tuple[tuple[str, int, float], ...] = ()
    """Every time that its answer went on elsewhere: the instance that had answered until then, the tokens of the answer
    that the client had, and the age."""
    decode_instance_id: str | None = None
    decode_placed_s: float | None = None
    decode_rounds: tuple[PlacementRound, ...] = ()
    transferred_tokens: int | None = None
    """Prompt tokens whose KV the decode instance was not believed to hold."""
    tenant: str = ""
    """The tenant that it was for; empty: no tenant."""
    key: str = ""
    """The name of the key that it came with."""
    limits: tuple[str, ...] = ()
    """The limits that it drew from, in words, where one kept it out."""
    priority_class: str = ""
    """The name of its class; empty: the pool has no classes."""
    class_rank: int = 0
    """The place of its class."""
    standing: Standing | None = None
    """The standing of its tenant when an instance was last chosen; None: it has none, or it was not judged."""
    hot_tokens: int = 0
    """Tokens of its hot prefix, whose own prefill weighs less."""
    on_time: bool | None = None
    """See ``RequestMachine.on_time``."""

    def told_of_classes(self) -> dict[str, Any]:
        """The reason for its place among others: its band, and its share in words; "" where that was not judged."""
        standing = self.standing
        return {
            "band": class_band(self.class_rank) + (0 if standing is None else standing.level),
            "share": "" if standing is None else _share_told(self, standing),
        }


class Explained(Protocol):
    """A request as far as it explains itself, see ``LiveRequest``."""

    machine: RequestMachine
    inference_request: InferenceRequest
    pool: ServedPool
    seen_epoch: int
    seen_tree_version: int
    seen_tree: HotnessTree
    """These three are as they were when it began."""


def explanation(live: Explained, expected_cached_tokens: int, now_s: float, now_unix_s: float) -> Explanation:
    """Describe what has happened to a request so far."""
    machine, request, pool = live.machine, live.inference_request, live.pool
    spec, received_unix_s = machine.spec, now_unix_s - (now_s - machine.started_s)
    chain = spec.chain
    if chain is None:
        return _explanation_of_passed_on(machine, request, pool, received_unix_s)
    tree, usage, scheduling = live.seen_tree, machine.usage or _NO_USAGE, pool.scheduling
    key_blocks = tree.key_blocks(chain, scheduling.max_key_blocks)
    class_name, class_rank = _class_of(pool, spec.class_rank) if scheduling.classes else _NO_CLASS
    rounds: list[PlacementRound] = []
    placed: Placed | None = None
    for search, attempt in machine.searches:
        for placed in search.rounds:
            rounds.append(PlacementRound.of(placed, attempt))
    # Arguments go by place, and none is unpacked: every request pays for this once, and by name it costs six times as
    # much.
    explained = Explanation(
        machine.request_id,
        request.model,
        pool.settings.name,
        pool.policy.name,
        spec.slo_s,
        spec.stored_tokens + chain.prompt_tokens,
        len(chain.hashes),
        key_blocks,
        chain.prefix_hash(key_blocks),
        live.seen_tree_version,
        live.seen_epoch,
        received_unix_s,
        tuple(rounds),
        (),
        (),
        machine.instance_id or None,
        machine.placed_s,
        machine.held_so_far_s(now_s) if machine.tries or machine.placed is not None else None,
        None if (estimate := machine.estimate) is None else estimate.decision.expected_ttft_s,
        machine.first_token_s,
        machine.ended_s,
        machine.outcome,
        expected_cached_tokens,
        usage.cached_tokens,
        usage.prompt_tokens,
        usage.output_tokens,
        chain.block_tokens,
        chain.block_tokens * chain.key_stride,
        machine.leg,
        machine.prefilled_s,
        request.client,
        machine.continuations,
        None,
        None,
        (),
        None,
        spec.tenant,
        "" if request.caller is None else request.caller.key,
        (),
        class_name,
        class_rank,
        placed.reply.standing if placed is not None and spec.tenant else None,
        tree.hot_tokens(chain),
        machine.on_time,
    )
    drawn = machine.drawn
    if machine.failures or machine.decode is not None or (drawn is not None and drawn.unmet is not None):
        return replace(explained, **_of_few(machine, chain))
    return explained


def _of_few(machine: RequestMachine, chain: Chain) -> dict[str, Any]:
    """The fields that few requests have: failures, a second leg, limits that kept it out."""
    found: dict[str, Any] = {"limits": limits_told(machine.spec.draws, machine.drawn)}
    found["failures"], found["failed_after_s"] = _failures(machine)
    decode = machine.decode
    if decode is not None:
        found["decode_instance_id"], found["decode_placed_s"] = decode.last_id or None, decode.placed_s
        found["decode_rounds"] = tuple([PlacementRound.of(placed, attempt) for placed, attempt in decode.rounds])
        found["transferred_tokens"] = chain.prompt_tokens - decode.cached_tokens
    return found


_NO_USAGE: Final = Usage()
_NO_CLASS: Final = ("", 0)


def _class_of(pool: ServedPool, rank: int) -> tuple[str, int]:
    """The name and the place of a class of a pool that has some; there can be fewer of them by now."""
    classes = pool.scheduling.classes
    rank = min(rank, len(classes) - 1)
    return classes[rank].name, rank


def _share_told(explained: Explanation, standing: Standing) -> str:
    """The standing of its tenant in words, with figures, and what came of it."""
    sent_s, share_s = standing.sent_s, standing.share_s
    if not share_s:
        return ""  # no instance was ready
    had_sent = (
        f"tenant {explained.tenant} had sent {sent_s / share_s:.2g} times its share of the work"
        f" ({sent_s:,.1f} s of {share_s:,.1f} s)"
    )
    if standing.level == 0:
        return had_sent if sent_s <= share_s else f"{had_sent}, and no other one was active"
    match explained.rounds[-1].status:
        case PlaceStatus.HELD:
            return f"held: {had_sent}, so others go first and it is the first to be passed over"
        case PlaceStatus.MISSED:
            return f"refused: {had_sent}, so it had to wait for others and would have been late"
        case PlaceStatus.DISPATCHED:
            return f"{had_sent}, but there was room"
        case _:
            return had_sent


_Failures = tuple[tuple[str, ...], tuple[float, ...]]


def _failures(machine: RequestMachine) -> _Failures:
    """Every failure in words, and when it came."""
    failures = machine.failures
    words = tuple([f"{instance_id}: {failure}" for instance_id, failure, _ in failures])
    return words, tuple([failed_s for _, _, failed_s in failures])


def _explanation_of_passed_on(
    machine: RequestMachine, request: InferenceRequest, pool: ServedPool, received_unix_s: float
) -> Explanation:
    """The record of a request that was not placed by its prefix. Its tokens are known by report alone."""
    usage, (failures, failed_after_s) = machine.usage or Usage(), _failures(machine)
    return Explanation(
        request_id=machine.request_id,
        model=machine.spec.model,
        pool=pool.settings.name,
        policy="passed_on",
        slo_s=machine.spec.slo_s,
        prompt_tokens=usage.prompt_tokens or 0,
        chain_blocks=0,
        key_blocks=0,
        hash_key=0,
        tree_version=0,
        epoch=0,
        received_unix_s=received_unix_s,
        failures=failures,
        failed_after_s=failed_after_s,
        instance_id=machine.instance_id or None,
        placed_s=0.0,
        done_s=machine.ended_s,
        outcome=machine.outcome,
        reported_cached_tokens=usage.cached_tokens,
        reported_prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        client=request.client,
        tenant=machine.spec.tenant,
        key="" if request.caller is None else request.caller.key,
        limits=limits_told(machine.spec.draws, machine.drawn),
    )


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
        entries, request_id = self._entries, explanation.request_id
        if request_id in entries:
            del entries[request_id]  # one that ends again is the newest
        entries[request_id] = _encoder.encode(explanation)
        if len(entries) > self._limit:
            entries.popitem(last=False)

    def get(self, request_id: str) -> Explanation | None:
        packed = self._entries.get(request_id)
        return None if packed is None else _unpacked(packed)

    def recent(self, limit: int) -> list[Explanation]:
        """The one that ended last comes first."""
        return list(map(_unpacked, islice(reversed(self._entries.values()), limit)))


def _plain(loads: Mapping[str, InstanceLoad]) -> Any:
    """Loads that are no dictionary, for the encoder."""
    return loads.raw if isinstance(loads, ReportedLoads) else dict(loads)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def _unpacked(packed: bytes) -> Explanation:
    told = dict(zip(_FIELDS, msgspec.msgpack.decode(packed), strict=True))
    for name in ("rounds", "decode_rounds"):
        told[name] = tuple([_round(*each) for each in told[name]])
    texts = {name: tuple(told[name]) for name in ("failures", "failed_after_s", "limits")}
    texts["continued"] = tuple(map(tuple, told["continued"]))
    standing = told["standing"] and Standing(*told["standing"])
    return Explanation(**told | texts | {"leg": Leg(told["leg"]), "standing": standing})


def _round(
    named: list[str], loads: Any, decision: list[Any], attempt: int, status: str, in_all: int, *times_ms: int
) -> PlacementRound:
    if isinstance(loads, dict):
        seen: Mapping[str, InstanceLoad] = {
            name: InstanceLoad(name, InstanceState(state), *figures) for name, (_, state, *figures) in loads.items()
        }
    else:
        seen = ReportedLoads(*loads)
    made = dict(zip(_DECISION_FIELDS, decision, strict=True))
    made["reason"] = Reason(made["reason"])
    return PlacementRound(tuple(named), seen, Decision(**made), attempt, PlaceStatus(status), in_all, *times_ms)


_FIELDS = [each.name for each in fields(Explanation)]
_DECISION_FIELDS = [each.name for each in fields(Decision)]
