"""The search for an instance: which to weigh or observe, what to reserve, and what to do when that fails.

Usually one step: the policy's weights go to the store, which takes the least weighted sum over its current counts and
reserves there (``Placement``). It weighs instances beyond the candidates too, where they could cost less. Policies that
do not weigh observe, then reserve what they chose.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from functools import partial
from typing import Protocol

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Form, Weights, features_of
from dualmap.scheduling.placing.decision import Decision, Policy, RouteQuery
from dualmap.scheduling.placing.options import (
    SCHEDULED,
    Option,
    SecondOption,
    choose_option,
    judge,
    judge_transfer,
    named_in,
)
from dualmap.scheduling.placing.split import SplitRule
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import QueueHead, QueueOrder
from dualmap.scheduling.state.hotness import HashKey
from dualmap.scheduling.state.instance import InstanceLoad, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.steps import Step, Steps
from dualmap.scheduling.tenants.budgets import Drawn, Draws
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


_NONE_CHOSEN = frozenset({PlaceStatus.NOT_READY, PlaceStatus.DUPLICATE, PlaceStatus.LIMITED})
_RESERVED = frozenset({PlaceStatus.DISPATCHED, PlaceStatus.HELD})
_DECODE = Leg.DECODE


@value
class Placement:
    """The placement of one request, as the store is called with it."""

    request: StoredRequest
    """The request, held and without an instance; its ``enqueued_ms`` is 0 if it was never placed before."""
    chain: Chain
    instances: tuple[str, ...]
    weights: Weights
    beyond_from_s: float | None = None
    """The instance that holds the prefix, and the least loaded, are weighed too where they could cost so much less than
    those named; None: they are not."""
    excluded: frozenset[str] = _NONE
    """Never weighed."""
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
    max_pending_tokens: int | None = None
    """STALE where the instance has more."""
    leg: Leg = Leg.WHOLE
    """How it counts on these instances. A decode leg is never held, and prefilled from the start."""
    roles: tuple[Role, ...] = SCHEDULED
    """Roles whose least loaded instances are weighed beyond the candidates."""
    decider: Form = Form()
    """Form by which the instance of least cost is compared with that of ``other``. Features as in weights."""
    other: SecondOption | None = None
    """The second option, taken if the decider of its instance of least cost is lower."""
    draws: Draws | None = None
    """LIMITED where they do not all fit; else they are drawn with the reservation."""
    must_draw: bool = False
    """The budgets are overdrawn rather than that the request is refused: it was admitted before."""
    share: Share | None = None
    """The tenant as the books of shares have it; None: the request is not judged among tenants."""
    band: int | None = None
    """The lowest band of its priority class; None: there are no classes."""
    fills: bool = False
    """The request fills idle room: it is dispatched at once where nothing else is to be prefilled, else held as
    deferred."""
    hot_tokens: int = 0
    """Tokens of its hot prefix."""


@value
class PlaceReply:
    """The store's reply to a placement: the loads it found and the reservation it made."""

    status: PlaceStatus
    epoch: int
    tree_version: int
    now_ms: int
    loads: Mapping[str, InstanceLoad]
    """Loads of the weighed instances, before the reservation."""
    instance_id: str | None = None
    alternative_id: str | None = None
    uncached_tokens: int = 0
    """Prompt tokens to prefill where the request was placed. Resident blocks are subtracted; in a queue by order of
    arrival, reserved blocks as well."""
    enqueued_ms: int = 0
    queue: QueueHead | None = None
    """The queue where the request is held although there is room: to be planned."""
    leg: Leg = Leg.WHOLE
    """The leg as which the request was placed."""
    hits: Mapping[str, int] = field(default_factory=dict)
    """The hit blocks of the loads: to make a load may take work."""
    ttft_s: float = 0.0
    """Expected TTFT where the request was placed, by the weights."""
    running_requests: int = 0
    """Requests that ran on the instance before this one."""
    context_tokens: int = 0
    drawn: Drawn | None = None
    """The budgets after the reservation, or why there is none; None: the request draws from none."""
    standing: Standing | None = None
    """The standing of its tenant among others; None: it has none, or was not judged."""
    max_load_tokens: int | None = None
    """Tokens that its engine may load from tiers: loading more takes longer than computing; None: all that they have.
    """


@value
class Observation:
    """Loads and sequence number that a choice is made from, read in one round trip."""

    epoch: int
    tree_version: int
    sequence: int
    """Grows by one with every observation in the pool, over all replicas."""
    loads: Mapping[str, InstanceLoad]
    """Loads by instance id, in the order requested; unknown instances are missing."""


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
    ) -> None:
        super().__init__("no instance takes the request")
        self.full = full
        """Instances whose queue is full."""
        self.missed = missed
        """The placement that was refused for its expected miss of the SLO."""
        self.duplicate = duplicate
        self.limited = limited
        """The budgets, of which one has not enough left."""


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
        chosen = self.reply.instance_id
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
        return features_of(self.reply.loads[self.instance_id], chain, decode_stall_s)


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
    """Decides whether a request is split that may be; None: each is served by one instance, whatever the pool's
    roles."""


@record
class Search:
    """One search; ``run`` it once for every attempt."""

    rules: SearchRules
    query: RouteQuery
    """Nothing excluded but where it failed before. Its SLO is that of its prefill where it may be split."""
    request: StoredRequest
    refuses: bool = False
    """Late requests are refused."""
    may_split: bool = False
    leg: Leg = Leg.WHOLE
    """DECODE for the second leg of a split request."""
    only: frozenset[str] | None = None
    """The instances that may be chosen; None: any."""
    draws: Draws | None = None
    """The draws of the request from its tenant's budgets."""
    must_draw: bool = False
    """The request was admitted before: its budgets are overdrawn rather than that it is refused."""
    weight: float | None = None
    """The weight of its tenant; None: no books of shares are kept."""
    class_rank: int = 0
    rounds: list[Placed] = field(default_factory=list)
    """Every choice, the last one last."""
    full: frozenset[str] = _NONE
    gone: frozenset[str] = _NONE
    trips: int = 0
    """Calls made to the store."""
    key: HashKey | None = None
    """The hash key by which its first candidates were found; None: there have been none."""
    _refreshed: bool = False
    _ignores_breakers: bool = False
    stale_rounds: int = 0
    _trusts_prior: bool = False
    """An idle instance refused what its prior would serve in time: it takes the request if it is idle still."""

    def run(self) -> Steps[PlacingPort, Placed]:
        """The placed request; its last round.

        Raises:
            SearchFailed: see there.
        """
        for _ in range(MAX_ROUNDS):
            try:
                placed = yield from self._round()
            except NoInstanceError:
                yield from self._widen()
                continue
            if placed is None:
                continue
            self.rounds.append(placed)
            status = placed.reply.status
            if status in _RESERVED:
                return placed
            match status:
                case PlaceStatus.MISSED:
                    if not self._prior_meets_slo(placed):
                        raise SearchFailed(missed=placed)
                    self._trusts_prior = True
                case PlaceStatus.QUEUE_FULL:
                    self.full |= {placed.instance_id}
                case PlaceStatus.STALE:
                    self.stale_rounds += 1
                    self._trusts_prior = False
        raise SearchFailed(self.full)

    def _round(self) -> Steps[PlacingPort, Placed | None]:
        """One choice; None where nothing could be chosen from. Raises NoInstanceError."""
        options, policy = self._options(), self.rules.policy
        if policy.weighs:
            placement = self._placement(options)
            reply = yield from Place(placement)
            if reply.status in _NONE_CHOSEN:
                return (yield from self._none_chosen(placement, reply))
            assert reply.instance_id is not None
            where = reply.instance_id, reply.alternative_id, reply.hits, reply.loads
            option = options[-1] if reply.leg is options[-1].leg else options[0]
            if option.leg is _DECODE:  # at once: what is kept for later would keep the chain
                transfer = judge_transfer(policy, option, *where, reply.uncached_tokens)
                return Placed(reply, option.instances, transfer)
            return Placed(reply, option.instances, partial(judge, policy, option, *where, reply.ttft_s))
        self.trips += 1
        named, chain = named_in(options), self.query.chain
        seen = yield from Observe(named, chain)
        option, decision = choose_option(
            self.rules.policy, options, seen.sequence, seen.loads, self.rules.decode_stall_s
        )
        placement = self._placement([option], self._most(decision))
        reply = yield from Place(placement)
        if reply.status in _NONE_CHOSEN:
            return (yield from self._none_chosen(placement, reply))
        reply = replace(reply, loads=seen.loads, alternative_id=decision.alternative_id)
        return Placed(reply, named, decision)

    def _none_chosen(self, placement: Placement, reply: PlaceReply) -> Steps[PlacingPort, Placed | None]:
        """None of the instances takes requests: refresh the members."""
        if reply.status is PlaceStatus.DUPLICATE:
            raise SearchFailed(duplicate=True)
        if reply.status is PlaceStatus.LIMITED:
            raise SearchFailed(limited=reply.drawn)
        self.gone |= frozenset(placement.instances + (placement.other.instances if placement.other else ()))
        yield from Refresh()
        return None

    def _options(self) -> list[Option]:
        """The options of the request as of now, one or two. Raises NoInstanceError."""
        view = self.rules.fleet.sight.view.serving(self.request.model)
        if view.decoding is None:
            return [self._option(self.leg, view, None)]
        rule = self.rules.split
        if rule is None or not self.may_split:
            return [self._option(self.leg, view.of(self.leg), None)]
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
        learned = self.rules.fleet.sight.learned
        weights = self.rules.policy.weights(query, learned)
        if rule is None:
            return Option(leg, query, instances, weights, _NOT_COMPARED, view.roles)
        split = leg is Leg.PREFILL
        transfer_s = rule.transfer_s(learned, query.chain.prompt_tokens) if split else 0.0
        return Option(
            leg, query, instances, weights, rule.decider(split=split, learned=learned), view.roles, transfer_s
        )

    def _candidates(self, view: ClusterView) -> tuple[RouteQuery, tuple[str, ...]]:
        """The instances to weigh, none behind an open breaker if there are others; and the query with what that
        excludes."""
        query, rules = self.query, self.rules
        policy = rules.policy
        excluded = query.excluded | self.full | self.gone
        if self.only is not None:
            excluded |= view.instances.keys() - self.only
        blocked = _NONE if self._ignores_breakers else rules.fleet.blocked()
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

    def _placement(self, options: list[Option], most: int | None = None) -> Placement:
        rules, option = self.rules, options[0]
        policy, order = rules.policy, rules.order
        self.trips += 1
        beyond_from_s, other = policy.beyond_from_s if policy.weighs else None, None
        excluded = option.query.excluded
        band, fills = None, False
        if order.classes and self.leg is not _DECODE:
            band = class_band(min(self.class_rank, len(order.classes) - 1))
            fills = band >= order.fills_from
        if len(options) > 1:
            other = options[1].as_second(beyond_from_s)
            excluded |= options[1].query.excluded
        return Placement(
            self.request,
            option.query.chain,
            option.instances,
            option.weights,
            beyond_from_s,
            excluded,
            order.rank_ms(self.request.slo_ms),
            order.by_deadline,
            rules.at_once,
            self.refuses and not self._trusts_prior and not fills,
            policy.rebalances,
            0 if self._trusts_prior else most,
            option.leg,
            option.roles,
            option.decider,
            other,
            self.draws,
            self.must_draw,
            self._share(),
            band,
            fills,
            0 if option.query.key is None else option.query.key.hot_tokens,
        )

    def _share(self) -> Share | None:
        """The figures of its tenant. None where no books are kept, and where requests go in the order in which they
        came, as none is passed over there."""
        if self.weight is None or not self.rules.order.by_deadline or self.leg is _DECODE:
            return None
        return Share(self.request.shares_as or NO_TENANT, self.weight, len(self.rules.fleet.sight.view.ready))

    def _most(self, decision: Decision) -> int | None:
        """Upper bound of pending tokens for the choice to be valid: less than one dispatch window more than it saw."""
        if decision.seen_pending_tokens is None or self.stale_rounds >= CHECKED_ROUNDS:
            return None
        spec = self.rules.fleet.sight.view.instances[decision.instance_id]
        return decision.seen_pending_tokens + spec.dispatch_window_tokens

    def _prior_meets_slo(self, missed: Placed) -> bool:
        """Whether the instance is idle, and would meet the SLO by its prior. Such an instance refuses nothing: a
        refused request teaches nothing, so a wrong estimate would refuse such requests for ever."""
        load = missed.reply.loads[missed.instance_id]
        spec = self.rules.fleet.sight.view.instances.get(load.instance_id)
        if spec is None or load.pending_tokens > 0 or load.kv_demand >= 1.0:
            return False
        as_described = replace(load, prefill_tokens_per_s=spec.prefill_tokens_per_s)
        ttft_s = Learned().ttft.of(features_of(as_described, self.query.chain, self.rules.decode_stall_s))
        return ttft_s <= self.query.slo_s

    def _widen(self) -> Steps[PlacingPort, None]:
        """No instance can take the request: refresh the members, then try even those whose breaker is open."""
        if self.full:
            raise SearchFailed(self.full)
        if not self._refreshed:
            self._refreshed, self.gone = True, frozenset()
            yield from Refresh()
        elif not self._ignores_breakers:
            self._ignores_breakers = True
        else:
            raise SearchFailed


def _asked(query: RouteQuery, key: HashKey, excluded: frozenset[str], pair: tuple[str, ...] = ()) -> RouteQuery:
    """The query with its key, and other instances excluded."""
    return RouteQuery(query.chain, query.slo_s, query.sequence, query.expected_output_tokens, excluded, pair, key)
