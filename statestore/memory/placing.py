"""Placing in memory: the weighing of ``scheduling.placement.Placement`` and the reservation, in one step."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from scheduling.chain import Chain
from scheduling.instance import InstanceLoad
from scheduling.legs import Leg
from scheduling.placement import Placement, PlaceReply, PlaceStatus
from scheduling.queue_order import QueueHead
from scheduling.request import Request, RequestState
from scheduling.values import value
from scheduling.ways import Side
from scheduling.weights import Form, attention_pairs, features_of
from statestore.memory.instance import InstanceBook
from statestore.memory.state import PoolState


@value
class _Offer:
    """What the request would cost on an instance."""

    cost: float
    ttft_s: float
    missed: bool
    load: InstanceLoad
    decides: float
    """Compared with the least of the other side."""


_cost = attrgetter("cost")


class Placing:
    """One placement. Lives for one call."""

    def __init__(self, state: PoolState, placement: Placement) -> None:
        self._state = state
        self._placement = placement
        self._stall_from_s = state.scheduling.decode_stall_s
        self._now_ms = state.now_ms()
        self._slo_s = placement.request.slo_ms / 1000
        self._seen: dict[str, InstanceLoad] = {}
        self._leg = placement.leg
        self._chosen: _Offer | None = None

    def run(self) -> PlaceReply:
        placement, request = self._placement, self._placement.request
        known = self._state.requests.get(request.request_id)
        if known is not None:
            return self._standing(known)
        offers, other = self._offers(placement), placement.other
        others = [] if other is None else self._offers(other)
        if other is not None and others and (not offers or others[0].decides < offers[0].decides):
            offers, self._leg = others, other.leg
        if not offers:
            return self._reply(PlaceStatus.NOT_READY)
        return self._reserve(offers[0], offers[1] if len(offers) > 1 else None)

    def _offers(self, side: Placement | Side) -> list[_Offer]:
        """What the request would cost on the instances of one side, the least first."""
        weighed: dict[str, _Offer | None] = {}
        for instance_id in side.instances:
            self._weigh(instance_id, side, weighed)
        if side.beyond_from_s is not None and any(weighed.values()):
            self._look_beyond(side.beyond_from_s, side, weighed)
        return _by_cost(weighed)

    def _standing(self, known: Request) -> PlaceReply:
        """A repetition after a lost answer gets the present state; another request of the id is left alone."""
        request = self._placement.request
        if (known.replica_id, known.attempt) != (request.replica_id, request.attempt):
            return self._reply(PlaceStatus.DUPLICATE)
        weighed: dict[str, _Offer | None] = {}
        self._weigh(known.instance_id, self._placement, weighed)
        self._chosen = weighed.get(known.instance_id)
        status = PlaceStatus.HELD if known.state is RequestState.HELD else PlaceStatus.DISPATCHED
        return self._reply(status, replace(known, alternative_id=None))

    def _weigh(self, instance_id: str, side: Placement | Side, weighed: dict[str, _Offer | None]) -> None:
        book, chain = self._state.instances.get(instance_id), self._placement.chain
        if book is None or instance_id in weighed or instance_id in self._placement.excluded:
            return
        load = book.load_now(self._now_ms, book.kv.hit_blocks(chain.hashes))
        self._seen[instance_id], weighed[instance_id] = load, None
        if book.takes_requests(side.leg):
            weights, features = side.weights, features_of(load, chain, self._stall_from_s)
            ttft_s, cost = weights.ttft.of(features), weights.cost_of(features, self._slo_s)
            weighed[instance_id] = _Offer(cost, ttft_s, ttft_s > self._slo_s, load, side.decider.of(features))

    def _look_beyond(self, from_s: float, side: Placement | Side, weighed: dict[str, _Offer | None]) -> None:
        """Weigh others where they may cost less. Their least cost: the prefill that the deepest known hit leaves."""
        state, chain, cost = self._state, self._placement.chain, side.weights.cost
        best, rankings = _by_cost(weighed)[0], [state.least_loaded[role] for role in side.roles]
        if from_s + cost.of(_idle(chain, len(chain.hashes), best.load)) >= best.cost:
            return
        holder, depth = state.prefixes.find(chain)
        least_cost = from_s + cost.of(_idle(chain, max(best.load.hit_blocks, depth), best.load))
        if holder is not None and least_cost < best.cost and any(holder in ranking for ranking in rankings):
            self._weigh(holder, side, weighed)
        for ranking in rankings:
            for instance_id, work_s in ranking.first():
                if work_s + least_cost < _by_cost(weighed)[0].cost:
                    self._weigh(instance_id, side, weighed)

    def _reserve(self, chosen: _Offer, second: _Offer | None) -> PlaceReply:
        self._chosen = chosen
        placement, load = self._placement, chosen.load
        book = self._state.instances[load.instance_id]
        first = placement.request.attempt == 1
        goes_now = self._goes_now(book, chosen)
        request = self._request(book, chosen, None if second is None else second.load, goes_now)
        if placement.max_pending_tokens is not None and load.pending_tokens > placement.max_pending_tokens:
            return self._reply(PlaceStatus.STALE, request)
        if placement.refuses and chosen.missed:
            return self._reply(PlaceStatus.MISSED, request)
        if not goes_now and first and book.queued_requests >= book.spec.max_queued_requests:
            return self._reply(PlaceStatus.QUEUE_FULL, request)
        self._enter(book, request, goes_now)
        if first and self._leg is not Leg.DECODE:
            self._state.log_arrival(placement.chain, self._now_ms)
        if placement.rebalances and chosen.missed:
            self._state.wanted.setdefault(load.instance_id, self._now_ms)
            if second is not None and second.missed:
                self._state.wanted.setdefault(second.load.instance_id, self._now_ms)
        if goes_now:
            return self._reply(PlaceStatus.DISPATCHED, request)
        return self._reply(PlaceStatus.HELD, request, book.room(self._now_ms))

    def _goes_now(self, book: InstanceBook, chosen: _Offer) -> bool:
        if self._leg is Leg.DECODE:
            return True
        if book.queue:
            return False
        has_room = book.may_run() if self._placement.at_once else book.has_room()
        if not self._placement.defers:
            return has_room
        chain, enqueued_ms = self._placement.chain, self._placement.request.enqueued_ms or self._now_ms
        tokens = chain.uncached_tokens(book.kv.resident_blocks(chain.hashes))
        if not book.finds_memory(tokens):
            return False
        is_idle = book.dispatched_tokens == 0 and chosen.load.kv_demand < 1.0
        if has_room and (is_idle or not chosen.missed):
            return True
        return book.is_calm(tokens, enqueued_ms + self._placement.rank_ms, self._now_ms)

    def _request(self, book: InstanceBook, chosen: _Offer, other: InstanceLoad | None, goes_now: bool) -> Request:
        """Weighed by reserved blocks as well. Counted by these only where requests go in the order in which they came:
        those that reserved them go before it."""
        chain, asked = self._placement.chain, self._placement.request
        by_resident = goes_now or self._placement.defers
        blocks = book.kv.resident_blocks(chain.hashes) if by_resident else chosen.load.hit_blocks
        decodes, state = self._leg is Leg.DECODE, RequestState.DISPATCHED if goes_now else RequestState.HELD
        return replace(
            asked,
            instance_id=chosen.load.instance_id,
            leg=self._leg,
            state=RequestState.PREFILLED if decodes else state,
            prefilled_ms=self._now_ms if decodes else 0,
            uncached_tokens=chain.uncached_tokens(blocks),
            enqueued_ms=asked.enqueued_ms or self._now_ms,
            dispatched_ms=self._now_ms if goes_now else 0,
            alternative_id=None if other is None else other.instance_id,
            alternative_uncached_tokens=0 if other is None else chain.uncached_tokens(other.hit_blocks),
        )

    def _enter(self, book: InstanceBook, request: Request, goes_now: bool) -> None:
        state, chain = self._state, self._placement.chain
        if not goes_now:
            state.chains[request.request_id] = chain
        book.stamp(chain, len(chain.hashes) if goes_now else book.kv.resident_blocks(chain.hashes))
        if self._leg is not Leg.DECODE:
            book.assigned = book.assigned.add(self._now_ms, request.uncached_tokens)
            state.prefixes.stamp(chain, request.instance_id)
        state.enter(book, request, request.enqueued_ms + self._placement.rank_ms)
        state.meet(request.replica_id)

    def _reply(self, status: PlaceStatus, request: Request | None = None, queue: QueueHead | None = None) -> PlaceReply:
        state = self._state
        hits = {name: load.hit_blocks for name, load in self._seen.items()}
        told = PlaceReply(status, state.epoch, state.tree_version, self._now_ms, self._seen, hits=hits)
        chosen = self._chosen
        if request is None:
            return told
        return replace(
            told,
            instance_id=request.instance_id,
            alternative_id=request.alternative_id,
            uncached_tokens=request.uncached_tokens,
            enqueued_ms=request.enqueued_ms,
            queue=queue,
            leg=request.leg,
            ttft_s=0.0 if chosen is None else chosen.ttft_s,
            running_requests=0 if chosen is None else chosen.load.running_requests,
            context_tokens=0 if chosen is None else chosen.load.context_tokens,
        )


def _by_cost(weighed: dict[str, _Offer | None]) -> list[_Offer]:
    return sorted([offer for offer in weighed.values() if offer is not None], key=_cost)


def _idle(chain: Chain, hit_blocks: int, alike: InstanceLoad) -> Form:
    """The features of an idle instance with such a hit, as fast as ``alike``."""
    uncached_tokens = chain.uncached_tokens(hit_blocks)
    return Form(
        1.0,
        compute_s=uncached_tokens / alike.prefill_tokens_per_s,
        uncached_tokens=uncached_tokens,
        attention_pairs=attention_pairs(uncached_tokens, chain.prompt_tokens),
        prompt_tokens=chain.prompt_tokens,
    )
