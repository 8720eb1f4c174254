"""Why a request went where it went: its explanation, and a bounded memory of those that ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.prompts.prompt import WHY_UNRENDERED
from dualmap.router.tenants.rate_limits import limit_sentences
from dualmap.scheduling.placing.decision import Decision, Reason
from dualmap.scheduling.placing.placement import Placed, PlaceStatus
from dualmap.scheduling.request.machine import RequestMachine
from dualmap.scheduling.request.outcome import Usage
from dualmap.scheduling.state.adapter_wait import AdapterWait
from dualmap.scheduling.state.hotness import HashKey
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.tier_load import TierLoad
from dualmap.scheduling.tenants.classes import class_band, class_name
from dualmap.scheduling.tenants.shares import Standing
from dualmap.scheduling.values import in_order, value
from dualmap.statestore.records import ReportedLoads

if TYPE_CHECKING:
    from dualmap.router.requests.live_request import LiveRequest

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

TIERS: Mapping[str, str] = {"host": "host memory", "disk": "its disk", "pool": "the shared store"}
"""Tiers, in words."""

KEPT_CANDIDATES = 8
KEPT_EXPLANATIONS = 2048
"""Explanations that are kept, of the requests that ended last: a few megabytes."""

_RESERVED: Final = frozenset({PlaceStatus.DISPATCHED, PlaceStatus.HELD})


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
    times_ms: tuple[int, int] = (0, 0)
    """The store's times of the first reservation of the request, and of this reply."""
    named_in_all: int = 0
    """0: no more than are here."""

    @classmethod
    def of(cls, placed: Placed, attempt: int) -> PlacementRound:
        """The round, cut to what is kept: policies that observe the whole fleet see hundreds of loads."""
        decision, reply = placed.decision, placed.reply
        named, loads, times_ms = placed.candidates, reply.seen.loads, (reply.enqueued_ms, reply.seen.now_ms)
        if len(loads) <= KEPT_CANDIDATES:
            return cls(named, loads, decision, attempt, reply.status, times_ms)
        names = _candidates(named, loads)
        chosen = [name for name in (decision.instance_id, decision.alternative_id) if name is not None]
        others = (name for name in names if name not in chosen)
        kept = (*chosen, *islice(others, KEPT_CANDIDATES - len(chosen)))
        seen = {name: loads[name] for name in kept if name in loads}
        return cls(kept, seen, decision, attempt, reply.status, times_ms, len(names))

    @property
    def considered(self) -> int:
        """Candidates in all; ``candidates`` and ``loads`` keep a few of them."""
        return self.named_in_all or len(_candidates(self.named, self.loads))

    @property
    def candidates(self) -> tuple[str, ...]:
        return _candidates(self.named, self.loads)[:KEPT_CANDIDATES]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "candidates": self.candidates,
            "loads": {instance_id: asdict(load) for instance_id, load in self.loads.items()},
            "decision": asdict(self.decision),
            "why": REASONS[self.decision.reason],
            "attempt": self.attempt,
            "status": self.status,
            "considered": self.considered,
            "tiers": [words for each in self.loads.values() if (words := _tier_words(each))],
        }


def _tier_words(load: InstanceLoad) -> str:
    """What an instance loads from its tiers or pulls from another one, and what it computes though it is there; empty
    for nothing."""
    loads = load.tiers
    loaded = [f"{blocks:,} blocks from {TIERS.get(tier, tier)}" for tier, blocks, _ in loads.by_tier if blocks]
    computed = [f"{blocks:,} blocks of {TIERS.get(tier, tier)}" for tier, _, blocks in loads.by_tier if blocks]
    parts = list[str]()
    if loaded:
        wait_s = loads.load_s - loads.link_s
        behind = f", {wait_s:.3f} s of it behind other loads" if wait_s > 0.0005 else ""
        parts.append(f"loads {' and '.join(loaded)} in {loads.load_s:.3f} s{behind}")
    if (source := loads.source) is not None:
        compute_s = source.tokens / load.prefill_tokens_per_s
        wait_s = loads.load_s - source.own_s
        behind = f", {wait_s:.3f} s of it behind what is booked on both links" if wait_s > 0.0005 else ""
        pulled = f"pulls {source.tokens:,} tokens from {source.instance_id} in {loads.load_s:.3f} s{behind}"
        parts.append(f"{pulled}, and saves {compute_s:.3f} s of computing")
    if computed:
        parts.append(f"computes {' and '.join(computed)}, as that costs less than to load them")
    return f"{load.instance_id} {', and '.join(parts)}" if parts else ""


def _candidates(named: tuple[str, ...], loads: Mapping[str, InstanceLoad]) -> tuple[str, ...]:
    """The instances that the policy named, and others beside them that were weighed."""
    return tuple(dict.fromkeys((*named, *loads)))


@value
class Origin:
    """The sender of a request, and the model, pool and key that it is for."""

    request_id: str
    model: str
    pool: str
    client: str | None = None
    """Name of the verified certificate that the client showed; None without one."""
    tenant: str = ""
    """The tenant that it was for; empty: no tenant."""
    key: str = ""
    """The name of the key that it came with."""


@value
class Terms:
    """The rules by which a request was placed."""

    policy: str
    priority_class: str = ""
    """The name of its class; empty: the pool has no classes."""
    class_rank: int = 0
    """The place of its class."""
    standing: Standing | None = None
    """The standing of its tenant when an instance was last chosen; None: it has none, or it was not judged."""


_NO_KEY: Final = HashKey(0, 0, 0, 0, 0)


@value
class KeyedPrompt:
    """The prompt of a request as it was placed by; all 0 where it was passed on."""

    prompt_tokens: int
    chain_blocks: int = 0
    block_tokens: int = 1
    """Tokens of a block of its chain."""
    key_stride: int = 1
    """Blocks of a key block, the unit of a key's length."""
    images: int = 0
    media_estimated: str = ""
    """Why the tokens of its images, or of other media, are estimated, as the end of a sentence; empty: it has none, or
    an instance rendered it."""
    key: HashKey = _NO_KEY
    """The key that it was first placed by, or would be where it was not."""


@value
class Course:
    """When things happened to a request; times are seconds since it was parsed."""

    received_unix_s: float
    slo_s: float
    placed_s: float | None = None
    """The age of the request when its first reservation was made."""
    held_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    on_time: bool | None = None
    """See ``RequestMachine.on_time``."""


@value
class Answer:
    """The answer of a request, as far as there is one."""

    instance_id: str | None = None
    """Where it was dispatched at last; differs from the decision's when it was migrated while held. Of a split request
    it is the one that prefilled it."""
    outcome: str | None = None
    expected_cached_tokens: int = 0
    tries: int = 0
    """``RequestMachine.tries``: clients, logs and traces get it as the number of attempts."""
    usage: Usage = field(default_factory=Usage)
    """The usage as the instance reported it."""


@value
class DecodeLeg:
    """The second leg of a split request, which gives its answer."""

    instance_id: str | None
    placed_s: float | None
    rounds: tuple[PlacementRound, ...]
    transferred_tokens: int
    """Prompt tokens whose KV the decode instance was not believed to hold."""


@value
class Detours:
    """Facts that few requests have."""

    failures: tuple[str, ...] = ()
    failed_after_s: tuple[float, ...] = ()
    """The time of each failure."""
    continued: tuple[tuple[str, int, float], ...] = ()
    """Every time that its answer went on elsewhere: the instance that had answered until then, the tokens of the answer
    that the client had, and the age."""
    limits: tuple[str, ...] = ()
    """The limits that it drew from, in words, where one kept it out."""
    is_split: bool = False
    prefilled_s: float | None = None
    """The age of the request when the prefill leg had answered."""
    decode: DecodeLeg | None = None
    _: KW_ONLY
    run: str = ""
    """The run whose turn it was, as a hash of its name; empty: runs do not wait in this pool, or its client named none.
    """
    run_named_by: str = ""
    """The field by which its client named the run; empty: it named none."""
    parked_s: float | None = None
    """Time that the turn waited for memory; None: it was not admitted as a turn."""
    adapter_wait_s: float = 0.0
    """Time that it waited for instances to load its adapter."""


_NO_DETOURS: Final = Detours()


@value
class Explanation:
    """One request's record on this replica."""

    origin: Origin
    terms: Terms
    prompt: KeyedPrompt
    course: Course
    answer: Answer
    rounds: tuple[PlacementRound, ...] = ()
    detours: Detours = _NO_DETOURS

    @property
    def expected_ttft_s(self) -> float | None:
        """The TTFT that the last decision which was reserved expected, counted from that decision."""
        reserved = [each for each in self.rounds if each.status in _RESERVED]
        return reserved[-1].decision.expected_ttft_s if reserved else None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt, as its instance reported them, or else as they were expected."""
        return self.answer.usage.prompt_tokens or self.prompt.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached, as its instance reported them, or else as they were expected."""
        reported = self.answer.usage.cached_tokens
        return self.answer.expected_cached_tokens if reported is None else reported

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, but for its rounds."""
        origin, terms, prompt, detours = self.origin, self.terms, self.prompt, self.detours
        usage, standing, decode = self.answer.usage, terms.standing, detours.decode
        shown = asdict(origin) | asdict(terms) | asdict(prompt) | asdict(self.course) | asdict(self.answer)
        key = prompt.key
        del shown["usage"], shown["key_stride"]
        return shown | {
            "key": origin.key,
            "key_blocks": key.blocks,
            "hash_key": f"{key.hash:016x}",
            "hot_tokens": key.hot_tokens,
            "epoch": key.epoch,
            "tree_version": key.tree_version,
            "key_tokens": prompt.block_tokens * prompt.key_stride,
            "expected_ttft_s": self.expected_ttft_s,
            "reported_cached_tokens": usage.cached_tokens,
            "reported_prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "leg": Leg.PREFILL if detours.is_split else Leg.WHOLE,
            "prefilled_s": detours.prefilled_s,
            "failures": detours.failures,
            "failed_after_s": detours.failed_after_s,
            "continued": detours.continued,
            "limits": detours.limits,
            "run": detours.run,
            "run_named_by": detours.run_named_by,
            "parked_s": detours.parked_s,
            "adapter_wait_s": detours.adapter_wait_s,
            "band": class_band(terms.class_rank) + (0 if standing is None else standing.level),
            "share": "" if standing is None else _share_sentence(self, standing),
            "decode": None if decode is None or decode.placed_s is None else _decode_fields(decode),
        }


def _decode_fields(decode: DecodeLeg) -> dict[str, Any]:
    return {
        "instance_id": decode.instance_id,
        "placed_s": decode.placed_s,
        "rounds": [each.to_dict() for each in decode.rounds],
        "transferred_tokens": decode.transferred_tokens,
    }


def _share_sentence(explained: Explanation, standing: Standing) -> str:
    """The standing of its tenant in words, with figures, and what came of it."""
    sent_s, share_s = standing.sent_s, standing.share_s
    if not share_s:
        return ""  # no instance was ready
    had_sent = (
        f"tenant {explained.origin.tenant} had sent {sent_s / share_s:.2g} times its share of the work"
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


def explanation(live: LiveRequest, expected_cached_tokens: int, now_s: float, now_unix_s: float) -> Explanation:
    """Describe what has happened to a request so far."""
    machine, request, prompt, pool = live.machine, live.inference_request, live.prompt, live.pool
    spec, received_unix_s = machine.spec, now_unix_s - now_s + machine.started_s
    chain, caller = spec.chain, request.caller
    model, tenant, key = request.model, "", ""
    if caller is not None:
        tenant, key = spec.claim.tenant, caller.key
    if chain is None:
        model = spec.model
    origin = Origin(machine.request_id, model, pool.settings.name, request.client, tenant, key)
    usage, detours = machine.usage or _NO_USAGE, _NO_DETOURS
    is_plain = machine.turn is None and not machine.failures and machine.leg is not _PREFILL
    if not is_plain or machine.is_limited:
        detours = _detours(machine, _names_run(request), now_s)
    if live.adapter_wait_s:
        detours = replace(detours, adapter_wait_s=live.adapter_wait_s)
    if chain is None:
        # The tokens of a request that was passed on are known by report alone.
        return Explanation(
            origin,
            Terms("passed_on"),
            KeyedPrompt(usage.prompt_tokens or 0),
            Course(received_unix_s, spec.slo_s, 0.0, None, None, machine.ended_s),
            Answer(machine.instance_id or None, machine.outcome, 0, machine.tries, usage),
            (),
            detours,
        )
    classes = pool.scheduling.classes
    class_rank = min(spec.claim.class_rank, max(0, len(classes) - 1))  # there can be fewer of them by now
    rounds: list[PlacementRound] = []
    hash_key = standing = None
    for course, attempt in machine.searches:
        hash_key = hash_key or course.key
        for placed in course.rounds:
            rounds.append(PlacementRound.of(placed, attempt))
            standing = placed.reply.standing
    return Explanation(
        origin,
        Terms(pool.policy.name, class_name(classes, class_rank), class_rank, standing if tenant else None),
        KeyedPrompt(
            spec.stored_tokens + chain.prompt_tokens,
            len(chain.hashes),
            chain.block_tokens,
            chain.key_stride,
            0 if prompt is None else prompt.images,
            "" if prompt is None or prompt.unrendered is None else WHY_UNRENDERED[prompt.unrendered],
            hash_key or pool.view.view.key_of(chain),
        ),
        Course(
            received_unix_s,
            spec.slo_s,
            machine.placed_s,
            None if machine.placed_s is None else machine.held_so_far_s(now_s),
            machine.first_token_s,
            machine.ended_s,
            machine.on_time,
        ),
        Answer(machine.instance_id or None, machine.outcome, expected_cached_tokens, machine.tries, usage),
        tuple(rounds),
        detours,
    )


def _names_run(request: InferenceRequest) -> str:
    """The field of a request that names its run; empty: none."""
    if request.run is not None:
        return request.run.field
    return "" if request.continues is None else "previous_response_id"


def _detours(machine: RequestMachine, run_named_by: str, now_s: float) -> Detours:
    failures, decode, chain = machine.failures, machine.decode, machine.spec.chain
    leg = None
    if decode is not None and chain is not None:
        rounds = tuple([PlacementRound.of(placed, attempt) for placed, attempt in decode.rounds])
        leg = DecodeLeg(decode.last_id or None, decode.placed_s, rounds, chain.prompt_tokens - decode.cached_tokens)
    return Detours(
        tuple([f"{instance_id}: {failure}" for instance_id, failure, _ in failures]),
        tuple([failed_s for _, _, failed_s in failures]),
        machine.continuations,
        limit_sentences(machine.spec.claim.draws, machine.drawn),
        machine.leg is _PREFILL,
        machine.prefilled_s,
        leg,
        run="" if machine.turn is None else machine.turn.name.run,
        run_named_by=run_named_by,
        parked_s=None if machine.turn is None else machine.parked_so_far_s(now_s),
    )


_NO_USAGE: Final = Usage()
_PREFILL: Final = Leg.PREFILL


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
        entries, request_id = self._entries, explanation.origin.request_id
        if request_id in entries:
            del entries[request_id]  # one that ends again is the newest
        entries[request_id] = _encode(explanation)
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


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def _unpacked(packed: bytes) -> Explanation:
    origin, terms, prompt, course, answer, rounds, detours = msgspec.msgpack.decode(packed)
    *_, standing = terms
    *_, usage = answer
    prompt[-1] = HashKey(*prompt[-1])
    failures, failed_after_s, continued, limits, is_split, prefilled_s, leg, *named = detours
    run, run_named_by, parked_s, adapter_wait_s = named
    terms[-1], answer[-1] = standing and Standing(*standing), Usage(*usage)
    if leg is not None:
        leg[2] = tuple([_round(*each) for each in leg[2]])
        leg = in_order(DecodeLeg, leg)
    return Explanation(
        Origin(*origin),
        Terms(*terms),
        KeyedPrompt(*prompt),
        Course(*course),
        Answer(*answer),
        tuple([_round(*each) for each in rounds]),
        Detours(
            tuple(failures),
            tuple(failed_after_s),
            tuple(map(tuple, continued)),
            tuple(limits),
            is_split,
            prefilled_s,
            leg,
            run=run,
            run_named_by=run_named_by,
            parked_s=parked_s,
            adapter_wait_s=adapter_wait_s,
        ),
    )


def _round(
    named: list[str], loads: Any, decision: list[Any], attempt: int, status: str, times_ms: list[int], in_all: int
) -> PlacementRound:
    if isinstance(loads, dict):
        seen: Mapping[str, InstanceLoad] = {name: _load(*figures) for name, figures in loads.items()}
    else:
        seen = ReportedLoads(*loads)
    made = dict(zip(_DECISION_FIELDS, decision, strict=True))
    made["reason"] = Reason(made["reason"])
    enqueued_ms, placed_ms = times_ms
    return PlacementRound(
        tuple(named), seen, Decision(**made), attempt, PlaceStatus(status), (enqueued_ms, placed_ms), in_all
    )


def _load(instance_id: str, state: str, *figures: Any) -> InstanceLoad:
    load = in_order(InstanceLoad, (instance_id, InstanceState(state), *figures))
    return replace(load, tiers=TierLoad.of(load.tiers), adapter=AdapterWait(*load.adapter))


_DECISION_FIELDS = [each.name for each in fields(Decision)]
