"""The search for an instance: which to weigh or observe, what to reserve, and what to do when that fails.

Usually one step: the policy's weights go to the store, which takes the least weighted sum over its current counts and
reserves there (``Placement``). It weighs instances beyond the candidates too, where they could cost less. Policies that
do not weigh observe, then reserve what they chose.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, field, replace
from enum import StrEnum
from functools import partial
from typing import Final, Protocol

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Form, features_of
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.placing.options import (
    Option,
    Weighing,
    choose_option,
    named_in,
)
from dualmap.scheduling.placing.split import SplitRule
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import QueueHead, QueueOrder
from dualmap.scheduling.runs.turn import Turn
from dualmap.scheduling.state.hotness import HashKey
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.state.tier_load import NO_LOAD, TierLoad
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.steps import Step, Steps
from dualmap.scheduling.tenants.budgets import Drawn, DrawnReply, Draws
from dualmap.scheduling.tenants.classes import class_band
from dualmap.scheduling.tenants.shares import NO_TENANT, Share, Standing
from dualmap.scheduling.values import record, value

MAX_ROUNDS = 12
CHECKED_ROUNDS = 2
"""Choices whose load the reservation checks again. The next one is reserved without a check, so that a burst of
arrivals cannot keep a request out of the fleet by changing the load between its steps."""

_NONE: frozenset[str] = frozenset()
_NOT_COMPARED = Form()
"""The decider of a request that has one option only."""


class PlaceStatus(StrEnum):
    """The outcome of a placement."""

    DISPATCHED = "dispatched"
    """The instance had room: send the request now."""
    HELD = "held"
    """The request is queued; a grant will come."""
    STALE = "stale"
    """The load changed since the choice. Nothing was reserved, as in all that follow."""
    MISSED = "missed"
    """The request would miss its SLO everywhere, and such requests are refused."""
    NOT_READY = "not_ready"
    """None of the instances takes requests any more."""
    QUEUE_FULL = "queue_full"
    """The queue of the instance of least cost is at its limit."""
    DUPLICATE = "duplicate"
    """Another live request has this id: choose another id."""
    LIMITED = "limited"
    """A budget that the request draws from has not enough left."""
    PARKED = "parked"
    """The request is a turn whose run waits for memory."""


_NONE_CHOSEN = frozenset({PlaceStatus.NOT_READY, PlaceStatus.DUPLICATE, PlaceStatus.LIMITED, PlaceStatus.PARKED})
_RESERVED = frozenset({PlaceStatus.DISPATCHED, PlaceStatus.HELD})
_DECODE = Leg.DECODE
_ONLY_ONE = Reason.ONLY_ONE


@value
class Queueing:
    """How a placement treats a request for which an instance has no room, or no time."""

    rank_ms: int = 0
    """The place of the request in a queue, from ``enqueued_ms`` on, see ``scheduling.queues.queue_order``."""
    defers: bool = False
    """Whether the request is held, rather than dispatched at once, where it is expected to miss its SLO and work is
    left."""
    at_once: bool = False
    """Whether the request is dispatched however full the dispatch window is, if the instance may run one more."""
    refuses: bool = False
    """MISSED instead of a reservation where it is expected to miss its SLO."""
    rebalances: bool = False
    """Whether an expected miss of the SLO requests a rebalance of the instance, and of the next best if that is late
    too."""
    band: int | None = None
    """The lowest band of its priority class; None: there are no classes."""
    fills: bool = False
    """The request fills idle room: it is dispatched at once where nothing else is to be prefilled, else held as
    deferred."""


@value
class Placement:
    """The placement of one request, as the store is called with it."""

    request: StoredRequest
    """The request, held and without an instance; its ``enqueued_ms`` is 0 if it was never placed before."""
    chain: Chain
    weighing: Weighing
    """The leg and the instances that the request is placed as and on, at least cost."""
    other: Weighing | None = None
    """A second option, taken if the decider of its instance of least cost is lower."""
    excluded: frozenset[str] = _NONE
    """Instances that are never weighed."""
    queueing: Queueing = Queueing()
    _: KW_ONLY
    draws: Draws | None = None
    """LIMITED where they do not all fit; else they are drawn with the reservation."""
    must_draw: bool = False
    """The budgets are overdrawn rather than that the request is refused: it was admitted before."""
    share: Share | None = None
    """The tenant as the books of shares have it; None: the request is not judged among tenants."""
    max_pending_tokens: int | None = None
    """STALE where the instance has more."""
    hot_tokens: int = 0
    """Tokens of its hot prefix."""
    pulls: bool = True
    """Whether a part of the prompt may be pulled from another instance's cache, where the pool has pulls."""
    adapter_share: float = 1.0
    """Time of the loads of its adapter as a multiple of the described one (``scheduling.estimates.adapters``)."""
    source: str | None = None
    """The instance that is looked at as a source in place of the last one that was given the prompt's prefix."""
    turn: Turn | None = None
    """The turn that it is, where runs wait for memory: entered in their ledger first, and PARKED where it waits."""
    memory_tokens: int = 0
    """The KV memory that runs share, where it is a turn."""


@value
class Observation:
    """The findings of one call of the store: the loads that a choice is made from."""

    epoch: int
    tree_version: int
    loads: Mapping[str, InstanceLoad]
    """Loads by instance id, those of the weighed instances, or in the order requested; unknown instances are
    missing."""
    now_ms: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)
    """The hit blocks of the loads that a placement found: to make a load may take work."""
    sequence: int = 0
    """A number that grows by one with every observation in the pool, over all replicas; 0 for a placement."""


@value
class Chosen:
    """The instance that a placement chose, and what it found there."""

    instance_id: str | None = None
    """None: no instance takes requests."""
    alternative_id: str | None = None
    leg: Leg = Leg.WHOLE
    """The leg as which the request was placed."""
    uncached_tokens: int = 0
    """Prompt tokens to prefill where the request was placed. Resident blocks are subtracted; in a queue by order of
    arrival, reserved blocks as well."""
    ttft_s: float = 0.0
    """Expected TTFT where the request was placed, by the weights."""
    running_requests: int = 0
    """Requests that ran on the instance before this one."""
    context_tokens: int = 0
    _: KW_ONLY
    is_hybrid: bool = False
    """The instance is known to run a hybrid model: its hits end at some blocks alone."""
    loads: TierLoad = NO_LOAD
    """What it loads from tiers, and may load: where computing costs less, its engine is to load no more."""


@value
class PlaceReply:
    """The store's reply to a placement: the loads it found and the reservation it made."""

    status: PlaceStatus
    seen: Observation
    """The pool before the reservation."""
    chosen: Chosen = Chosen()
    enqueued_ms: int = 0
    queue: QueueHead | None = None
    """The queue where the request is held although there is room: to be planned."""
    drawn_reply: DrawnReply | None = None
    """The budgets after the reservation, or why there is none; None: the request draws from none."""
    standing: Standing | None = None
    """The standing of its tenant among others; None: it has none, or was not judged."""

    @property
    def drawn(self) -> Drawn | None:
        """The budgets by ``drawn_reply``."""
        return None if self.drawn_reply is None else self.drawn_reply.read()


class PlacingPort(Protocol):
    """Calls that a search makes."""

    def place(self, placement: Placement, /) -> Awaitable[PlaceReply]: ...

    def observe(self, instance_ids: Sequence[str], chain: Chain, /) -> Awaitable[Observation]: ...

    def refresh(self) -> Awaitable[object]:
        """Read the members again, as the view may be old."""


@value
class Place(Step[PlacingPort, PlaceReply]):
    """Weigh, choose and reserve."""

    placement: Placement

    def on(self, port: PlacingPort) -> Awaitable[PlaceReply]:
        return port.place(self.placement)


@value
class Observe(Step[PlacingPort, Observation]):
    """Read the loads of instances, and their hits of a chain."""

    instance_ids: tuple[str, ...]
    chain: Chain

    def on(self, port: PlacingPort) -> Awaitable[Observation]:
        return port.observe(self.instance_ids, self.chain)


@value
class Refresh(Step[PlacingPort, object]):
    """Renew the view."""

    def on(self, port: PlacingPort) -> Awaitable[object]:
        return port.refresh()


class Sight(Protocol):
    """A fleet as a search knows it."""

    @property
    def view(self) -> ClusterView: ...

    @property
    def learned(self) -> Learned: ...


class Fleet(Protocol):
    """The fleet as a search reads it."""

    @property
    def sight(self) -> Sight:
        """The object that has the newest view: every request reads it several times."""

    def blocked(self) -> frozenset[str]:
        """Instances behind an open breaker."""


class SearchFailed(Exception):  # noqa: N818  # an outcome, not a fault
    """No instance took the request."""

    def __init__(
        self,
        full: frozenset[str] = frozenset(),
        missed: Placed | None = None,
        duplicate: bool = False,
        limited: Drawn | None = None,
        parked: bool = False,
    ) -> None:
        super().__init__("no instance takes the request")
        self.course = NO_COURSE
        """The course of the search."""
        self.full = full
        """Instances whose queue is full."""
        self.missed = missed
        """The placement that was refused for its expected miss of the SLO."""
        self.duplicate = duplicate
        self.limited = limited
        """The budgets, of which one has not enough left."""
        self.parked = parked
        """It is a turn whose run waits for memory."""


@record
class Placed:
    """A choice, the loads that it was made from, and what became of it.

    What the choice means is judged when it is first read. It follows from the reply, so the moment does not matter, and
    the request can have been sent by then.
    """

    reply: PlaceReply
    candidates: tuple[str, ...]
    _decision: Decision | Callable[[], Decision]
    """The decision, or the function that judges it when it is first read."""

    @property
    def instance_id(self) -> str:
        chosen = self.reply.chosen.instance_id
        assert chosen is not None
        return chosen

    @property
    def decision(self) -> Decision:
        decision = self._decision
        if not isinstance(decision, Decision):
            self._decision = decision = decision()
        return decision

    def features(self, chain: Chain, decode_stall_s: float) -> Form:
        """Features of the chosen instance and the request's chain, which its first token is learned with."""
        return features_of(self.reply.seen.loads[self.instance_id], chain, decode_stall_s)


@value
class SearchCourse:
    """The choices of a search, and how it came to them."""

    rounds: tuple[Placed, ...] = ()
    """Every choice, the last one last."""
    key: HashKey | None = None
    """The hash key by which its first candidates were found; None: there have been none."""
    trips: int = 0
    """Calls made to the store."""
    stale_rounds: int = 0

    @property
    def placed(self) -> Placed:
        """The choice that the store took."""
        return self.rounds[-1]


NO_COURSE: Final = SearchCourse()
"""The course of a search that was never run."""


@value
class SearchRules:
    """The rules that are the same for all searches of a pool."""

    policy: Policy
    order: QueueOrder
    fleet: Fleet
    decode_stall_s: float
    at_once: bool = False
    """Nothing is to be held for a dispatch window, see ``holds``."""
    split: SplitRule | None = None
    """Decides whether a request is split; None: each is served by one instance, whatever the pool's roles."""


@value
class Claim:
    """The part that a request may take: from the budgets of its tenant, by the tenant's share, by its class."""

    tenant: str = ""
    """The tenant that it is for; empty: none."""
    account: str = ""
    """The account that it is metered for, see ``scheduling.request.metering``; empty: it is not metered."""
    draws: Draws | None = None
    """The draws from the budgets of the tenant."""
    weight: float | None = None
    """The weight of its tenant; None: nothing is shared among tenants."""
    class_rank: int = 0
    """The place of its priority class, where the pool has any."""


NO_CLAIM: Final = Claim()
"""The claim of a request in a pool without tenants and classes."""


@value
class Search:
    """One search; ``run`` it once for every attempt."""

    rules: SearchRules
    query: RouteQuery
    """Nothing excluded but where it failed before. Its SLO is that of its prefill where it may be split."""
    request: StoredRequest
    claim: Claim = NO_CLAIM
    _: KW_ONLY
    refuses: bool = False
    """Late requests are refused."""
    leg: Leg = Leg.WHOLE
    """DECODE for the second leg of a split request."""
    only: frozenset[str] | None = None
    """The instances that may be chosen; None: any."""
    pulls: bool = True
    """Whether a part of the prompt may be pulled; not any more once a pull has failed."""
    adapter_share: float = 1.0
    """See ``Placement.adapter_share``."""
    turn: Turn | None = None
    """The turn that it is, where it is not known yet whether that goes."""
    was_admitted: bool = False
    """Its budgets have let it in already: for a try that is over, or to wait for memory."""

    def run(self) -> Steps[PlacingPort, SearchCourse]:
        """The course of the search, which placed the request.

        Raises:
            SearchFailed: every queue is full, the SLO would be missed and late requests are refused, the id is taken, a
                budget of its tenant has not enough left, its run waits for memory, or no instance is ready.
        """
        return _Run(self).run()


@record
class _Run:
    """The state of a search while it runs."""

    search: Search
    rounds: tuple[Placed, ...] = ()
    full: frozenset[str] = _NONE
    _: KW_ONLY
    gone: frozenset[str] = _NONE
    trips: int = 0
    key: HashKey | None = None
    refreshed: bool = False
    ignores_breakers: bool = False
    stale_rounds: int = 0
    trusts_prior: bool = False
    """An idle instance refused what its prior would serve in time: it takes the request if it is idle still."""

    def run(self) -> Steps[PlacingPort, SearchCourse]:
        """See ``Search.run``."""
        try:
            for _ in range(MAX_ROUNDS):
                try:
                    placed = yield from self._round()
                except NoInstanceError:
                    yield from self._widen()
                    continue
                if placed is None:
                    continue
                self.rounds += (placed,)
                status = placed.reply.status
                if status in _RESERVED:
                    return self._course()
                match status:
                    case PlaceStatus.MISSED:
                        if not self._prior_meets_slo(placed):
                            raise SearchFailed(missed=placed)
                        self.trusts_prior = True
                    case PlaceStatus.QUEUE_FULL:
                        self.full |= {placed.instance_id}
                    case PlaceStatus.STALE:
                        self.stale_rounds += 1
                        self.trusts_prior = False
            raise SearchFailed(self.full)
        except SearchFailed as failed:
            failed.course = self._course()
            raise

    def _course(self) -> SearchCourse:
        return SearchCourse(self.rounds, self.key, self.trips, self.stale_rounds)

    def _round(self) -> Steps[PlacingPort, Placed | None]:
        """One choice; None where nothing could be chosen from. Raises NoInstanceError."""
        options, rules = self._options(), self.search.rules
        policy = rules.policy
        if policy.weighs:
            placement = self._placement(options)
            reply = yield from Place(placement)
            if reply.status in _NONE_CHOSEN:
                return (yield from self._none_chosen(placement, reply))
            leg, option = reply.chosen.leg, options[-1]
            if leg is not option.weighing.leg:
                option = options[0]
            if leg is _DECODE:  # at once: what is kept for later would keep the chain
                return Placed(reply, option.weighing.instances, judge_transfer(policy, option, reply))
            return Placed(reply, option.weighing.instances, partial(judge, policy, option, reply))
        self.trips += 1
        named, chain = named_in(options), self.search.query.chain
        seen = yield from Observe(named, chain)
        option, decision = choose_option(policy, options, seen.sequence, seen.loads, rules.decode_stall_s)
        placement = self._placement([option], self._most(decision), decision.source)
        reply = yield from Place(placement)
        if reply.status in _NONE_CHOSEN:
            return (yield from self._none_chosen(placement, reply))
        chosen = replace(reply.chosen, alternative_id=decision.alternative_id)
        reply = replace(reply, seen=replace(reply.seen, loads=seen.loads), chosen=chosen)
        return Placed(reply, named, decision)

    def _none_chosen(self, placement: Placement, reply: PlaceReply) -> Steps[PlacingPort, Placed | None]:
        """None of the instances takes requests: refresh the members."""
        if reply.status is PlaceStatus.DUPLICATE:
            raise SearchFailed(duplicate=True)
        if reply.status is PlaceStatus.LIMITED:
            raise SearchFailed(limited=reply.drawn)
        if reply.status is PlaceStatus.PARKED:
            raise SearchFailed(parked=True)
        self.gone |= frozenset(placement.weighing.instances + (placement.other.instances if placement.other else ()))
        yield from Refresh()
        return None

    def _options(self) -> list[Option]:
        """The options of the request as of now, one or two. Raises NoInstanceError."""
        search = self.search
        view = search.rules.fleet.sight.view.serving(search.request.model, search.request.revision)
        if view.decoding is None:
            return [self._option(search.leg, view, None)]
        rule = search.rules.split
        if rule is None:
            return [self._option(search.leg, view.of(search.leg), None)]
        options: list[Option] = []
        for leg in rule.legs:
            try:
                options.append(self._option(leg, view.of(leg), rule))
            except NoInstanceError:
                if leg is rule.legs[-1] and not options:
                    raise
            if options and rule.settings.mode != "auto":
                break
        return options

    def _option(self, leg: Leg, view: ClusterView, rule: SplitRule | None) -> Option:
        query, instances = self._candidates(view)
        rules = self.search.rules
        learned, policy = rules.fleet.sight.learned, rules.policy
        weights, beyond_from_s = policy.weights(query, learned), policy.beyond_from_s if policy.weighs else None
        if rule is None:
            return Option(query, Weighing(leg, instances, weights, _NOT_COMPARED, beyond_from_s, view.roles))
        split = leg is Leg.PREFILL
        transfer_s = rule.transfer_s(learned, query.chain.prompt_tokens) if split else 0.0
        decider = rule.decider(split=split, learned=learned)
        return Option(query, Weighing(leg, instances, weights, decider, beyond_from_s, view.roles), transfer_s)

    def _candidates(self, view: ClusterView) -> tuple[RouteQuery, tuple[str, ...]]:
        """The instances to weigh, none behind an open breaker if there are others; and the query with what that
        excludes."""
        search = self.search
        query, rules = search.query, search.rules
        policy = rules.policy
        excluded = query.excluded | self.full | self.gone
        if search.only is not None:
            excluded |= view.instances.keys() - search.only
        blocked = _NONE if self.ignores_breakers else rules.fleet.blocked()
        key = view.key_of(query.chain)
        if self.key is None:
            self.key = key
        pair = candidates = policy.candidates(_asked(query, key, excluded), view)
        if not (excluded or blocked):
            return _asked(query, key, _NONE, pair), pair
        while blocked and not blocked.isdisjoint(candidates):
            excluded |= blocked.intersection(candidates)
            candidates = policy.candidates(_asked(query, key, excluded), view)
        if excluded:
            pair = policy.candidates(_asked(query, key, _NONE), view)
        return _asked(query, key, excluded | blocked, pair), candidates

    def _placement(self, options: list[Option], most: int | None = None, source: str | None = None) -> Placement:
        search, option = self.search, options[0]
        rules, request, claim, query = search.rules, search.request, search.claim, option.query
        order, excluded, other = rules.order, query.excluded, None
        self.trips += 1
        band, fills, share, is_decoded = None, False, None, search.leg is _DECODE
        if order.classes and not is_decoded:
            band = class_band(min(claim.class_rank, len(order.classes) - 1))
            fills = band >= order.fills_from
        # Where requests go in the order in which they came, none is passed over.
        if claim.weight is not None and order.by_deadline and not is_decoded:
            share = Share(request.shares_as or NO_TENANT, claim.weight, len(rules.fleet.sight.view.ready))
        if len(options) > 1:
            other = options[1].weighing
            excluded |= options[1].query.excluded
        return Placement(
            request,
            query.chain,
            option.weighing,
            other,
            excluded,
            Queueing(
                order.rank_ms(request.slo_ms),
                order.by_deadline,
                rules.at_once,
                search.refuses and not self.trusts_prior and not fills,
                rules.policy.rebalances,
                band,
                fills,
            ),
            draws=claim.draws,
            must_draw=is_decoded or search.was_admitted,
            share=share,
            max_pending_tokens=0 if self.trusts_prior else most,
            hot_tokens=0 if query.key is None else query.key.hot_tokens,
            adapter_share=search.adapter_share,
            pulls=search.pulls and (rules.policy.weighs or source is not None),
            source=source,
            turn=search.turn,
            memory_tokens=0 if search.turn is None else rules.fleet.sight.view.kv_capacity_tokens,
        )

    def _most(self, decision: Decision) -> int | None:
        """Upper bound of pending tokens for the choice to be valid: less than one dispatch window more than it saw."""
        if decision.seen_pending_tokens is None or self.stale_rounds >= CHECKED_ROUNDS:
            return None
        spec = self.search.rules.fleet.sight.view.instances[decision.instance_id]
        return decision.seen_pending_tokens + spec.dispatch_window_tokens

    def _prior_meets_slo(self, missed: Placed) -> bool:
        """Whether the instance is idle, and would meet the SLO by its prior. Such an instance refuses nothing: a
        refused request teaches nothing, so a wrong estimate would refuse such requests for ever."""
        load = missed.reply.seen.loads[missed.instance_id]
        spec = self.search.rules.fleet.sight.view.instances.get(load.instance_id)
        if spec is None or load.pending_tokens > 0 or load.kv_demand >= 1.0:
            return False
        as_described = replace(load, prefill_tokens_per_s=spec.prefill_tokens_per_s)
        ttft_s = Learned().ttft.of(features_of(as_described, self.search.query.chain, self.search.rules.decode_stall_s))
        return ttft_s <= self.search.query.slo_s

    def _widen(self) -> Steps[PlacingPort, None]:
        """No instance can take the request: refresh the members, then try even those whose breaker is open."""
        if self.full:
            raise SearchFailed(self.full)
        if not self.refreshed:
            self.refreshed, self.gone = True, frozenset()
            yield from Refresh()
        elif not self.ignores_breakers:
            self.ignores_breakers = True
        else:
            raise SearchFailed


def _asked(query: RouteQuery, key: HashKey, excluded: frozenset[str], pair: tuple[str, ...] = ()) -> RouteQuery:
    """The query with its key, and other instances excluded."""
    return RouteQuery(query.chain, query.slo_s, query.sequence, query.expected_output_tokens, excluded, pair, key)


def judge(policy: Policy, option: Option, reply: PlaceReply) -> Decision:
    """The store's choice among the instances of an option, as a decision."""
    chain, chosen, hits = option.query.chain, reply.chosen, reply.seen.hits
    instance_id, alternative_id, ttft_s = chosen.instance_id, chosen.alternative_id, chosen.ttft_s
    assert instance_id is not None
    expected_ttft_s = (ttft_s if ttft_s > 0.0 else 0.0) + option.transfer_s
    hit, uncached_tokens = hits[instance_id], chain.uncached_tokens(hits[instance_id])
    if alternative_id is None:
        return Decision(instance_id, hit, uncached_tokens, expected_ttft_s, _ONLY_ONE)
    reason = policy.reason(option.query, hits, reply.seen.loads, instance_id, alternative_id)
    there = chain.uncached_tokens(hits[alternative_id])
    return Decision(instance_id, hit, uncached_tokens, expected_ttft_s, reason, alternative_id, there)


def judge_transfer(policy: Policy, option: Option, reply: PlaceReply) -> Decision:
    """The store's choice for a decode leg, as a decision. Its first token waits for the transfer, so no load is read
    for it."""
    chain, transfer, chosen = option.query.chain, option.weighing.weights.ttft, reply.chosen
    instance_id, other, uncached_tokens = chosen.instance_id, chosen.alternative_id, chosen.uncached_tokens
    assert instance_id is not None
    return Decision(
        instance_id,
        (chain.prompt_tokens - uncached_tokens) // chain.block_tokens,
        uncached_tokens,
        transfer.constant + transfer.uncached_tokens * uncached_tokens,
        _ONLY_ONE
        if other is None
        else policy.reason(option.query, reply.seen.hits, reply.seen.loads, instance_id, other),
        other,
    )
