"""Placements as their script takes them, those of one iteration of the event loop in a batch, and what the script
replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct, pack
from typing import Any, Generic, TypeVar

import orjson

from dualmap.scheduling.estimates.weights import Form
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import (
    Chosen,
    Observation,
    Placement,
    PlaceReply,
    PlaceStatus,
    Queueing,
)
from dualmap.scheduling.prompts.chain import sample_depths
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.tier_load import NO_LOAD, TierLoad
from dualmap.scheduling.tenants.budgets import DrawnReply
from dualmap.scheduling.tenants.shares import Share, Standing
from dualmap.statestore.pool.calls import Argument, Calls
from dualmap.statestore.pool.codec import queue_head_from
from dualmap.statestore.pool.readable import UNREADABLE, count_from, unreadable
from dualmap.statestore.pool.runs import turn_json
from dualmap.statestore.records import EMPTY_LOADED, HASH_BYTES, NO_WAITS, ReportedLoads, pack_chain, reported_of

MAX_PLACEMENTS = 16
"""Most placements in one script call: a script stops everything else, and its memory is not reused before it ends."""

MAX_OPTION_TEXTS = 256
"""Options whose texts are kept."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_LEGS = {leg.value.encode(): leg for leg in Leg}
_STATUSES = {status.value.encode(): status for status in PlaceStatus}
_LIMITED = PlaceStatus.LIMITED
_STANDING = Struct("<Hdd")


def placements_of(pool: bytes, calls: Calls, key_blocks: int) -> Batcher[Placement, PlaceReply]:
    """How requests are placed in the pool, whose keys begin with ``pool``. Of a chain's head, ``key_blocks`` go to the
    arrival log."""
    texts = OptionTexts()

    async def place(placements: Sequence[Placement]) -> Sequence[PlaceReply]:
        replies = await calls.script("place_requests", pool, *_arguments_of(placements, key_blocks, texts))
        try:
            return list(map(_reply_from, placements, replies))
        except UNREADABLE as error:
            raise unreadable("place", error) from error

    return Batcher(place, MAX_PLACEMENTS)


def _arguments_of(placements: Sequence[Placement], key_blocks: int, texts: OptionTexts) -> list[Argument]:
    options: dict[bytes, int] = {}
    arguments: list[Argument] = []
    for placement in placements:
        chain = placement.chain
        packed = pack_chain(chain.hashes)
        whole = chain.key_stride == 1 and chain.root is None
        head = packed[: HASH_BYTES * key_blocks] if whole else pack_chain(chain.key_hashes[:key_blocks])
        draws = b"" if placement.draws is None else placement.draws.packed
        share = b"" if placement.share is None else packed_share(placement.share)
        told = reported_of(placement.request)
        arguments += (_placement_json(placement, options, texts), packed, told, head, draws, share)
    return [b"[%b]" % b",".join(options), *arguments]


def _placement_json(placement: Placement, options: dict[bytes, int], texts: OptionTexts) -> bytes:
    """The placement as JSON, without fields that are false, empty or not given. ``options`` has the number of each
    option; new ones are added."""
    request, chain = placement.request, placement.chain
    excluded = b'"excluded":%b,' % orjson.dumps(dict.fromkeys(placement.excluded, True)) if placement.excluded else b""
    known = excluded if not request.enqueued_ms else excluded + b'"enqueued_ms":%d,' % request.enqueued_ms
    if placement.max_pending_tokens is not None:
        known += b'"max_pending_tokens":%d,' % placement.max_pending_tokens
    if not placement.pulls:
        known += b'"no_pulls":true,'
    elif placement.source is not None:
        known += b'"source":%b,' % orjson.dumps(placement.source)
    if placement.hot_tokens:
        known += b'"hot_tokens":%d,' % placement.hot_tokens
    if placement.adapter_share != 1.0:
        known += b'"adapter_share":%.6g,' % placement.adapter_share
    if placement.turn is not None:
        known += b'"turn":%b,"memory_tokens":%d,' % (turn_json(placement.turn), placement.memory_tokens)
    if (draws := placement.draws) is not None:
        if draws.group.is_divided:
            known += b'"divisions":%b,' % draws.group.divisions
        if placement.must_draw:
            known += b'"must_draw":true,'
    option = _number_of(placement.weighing, options, texts)
    if (other := placement.other) is not None:
        named = orjson.dumps(other.instances)
        known += b'"other":{%b"option":%d,"instances":%b},' % (excluded, _number_of(other, options, texts), named)
    return b'{"request_id":%b,"block_tokens":%d,"option":%d,"instances":%b,"samples_at":%b,%b%b}' % (
        orjson.dumps(request.request_id),
        chain.block_tokens,
        option,
        orjson.dumps(placement.weighing.instances),
        orjson.dumps(sample_depths(chain)),
        known,
        _terms_json(request.slo_ms, placement.queueing),
    )


@lru_cache(maxsize=1024)
def packed_share(share: Share) -> bytes:
    """The figures of a tenant's share, which are the same for most of its requests."""
    return pack("<dd", share.weight, share.instances) + share.name.encode()


class OptionTexts:
    """The JSON of options: the terms that most requests share, as a replica uses the same few weights until new ones
    are learned.

    Forms that are used again are known by their identity: to compare all their figures for every request would take
    longer than the rest of its option.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[bytes, tuple[Form, ...]]] = {}

    def of(self, option: Weighing) -> bytes:
        weights, decider = option.weights, option.decider
        key = (*map(id, weights), id(decider), option.beyond_from_s, option.leg, option.roles)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_OPTION_TEXTS:
                self._known.clear()
            text = _option_json(option)
            # The forms are kept with their text: no other form gets the identity of one that is kept.
            known = self._known[key] = text, (*weights, decider)
        return known[0]


def _number_of(option: Weighing, options: dict[bytes, int], texts: OptionTexts) -> int:
    return options.setdefault(texts.of(option), len(options) + 1)


def _option_json(option: Weighing) -> bytes:
    cost, ttft, missed = option.weights
    forms = {"cost": cost, "ttft": ttft, "missed": missed, "decider": option.decider}
    terms: dict[str, object] = {"leg": option.leg} | {name: _sparse(form) for name, form in forms.items()}
    if option.beyond_from_s is not None:
        terms |= {"beyond": option.beyond_from_s, "roles": option.roles}
    return orjson.dumps(terms)


def _sparse(form: Form) -> list[float]:
    """The weights that are not 0, each behind the place of its feature."""
    return [each for place, weight in enumerate(form, 1) if weight for each in (place, weight)]


@lru_cache(maxsize=256)
def _terms_json(slo_ms: int, queueing: Queueing) -> bytes:
    terms: dict[str, object] = {"slo_s": slo_ms / 1000, "rank_ms": queueing.rank_ms}
    if queueing.band is not None:
        terms["band"] = queueing.band
    flags = ("defers", "at_once", "refuses", "rebalances", "fills")
    return orjson.dumps(terms | {name: True for name in flags if getattr(queueing, name)})[1:-1]


def _reply_from(placement: Placement, reply: Sequence[Any]) -> PlaceReply:
    status, instance_id, other_id, uncached_tokens, enqueued_ms, epoch, tree_version, now_ms, *more = reply
    queue, leg, ttft_s, running_requests, context_tokens, drawn, standing, tiers, waits, *seen = more
    loaded = loaded_from(tiers)
    adapters = NO_WAITS if waits is None else orjson.loads(waits)
    loads, found, draws = ReportedLoads(seen, now_ms, loaded, adapters), _STATUSES[status], placement.draws
    where = instance_id.decode() or None
    return PlaceReply(
        found,
        Observation(count_from(epoch), count_from(tree_version), loads, now_ms, loads.hits),
        Chosen(
            where,
            other_id.decode() or None,
            _LEGS[leg],
            uncached_tokens,
            float(ttft_s),
            running_requests,
            context_tokens,
            is_hybrid=where in loads.hits and loads.is_hybrid(instance_id),
            loads=NO_LOAD if where is None else loaded.get(where, NO_LOAD),
        ),
        enqueued_ms,
        queue and queue_head_from(queue),
        None if draws is None or drawn is None else DrawnReply(draws, drawn, found is _LIMITED),
        standing and Standing(*_STANDING.unpack(standing)),
    )


def loaded_from(tiers: bytes | None) -> Mapping[str, TierLoad]:
    """The loads from tiers by instance, as scripts reply them; None where there are none."""
    if tiers is None:
        return EMPTY_LOADED
    return {
        name: TierLoad.of((blocks, load_s, link_s, None if most < 0 else most, *rest))
        for name, (blocks, load_s, link_s, most, *rest) in orjson.loads(tiers).items()
    }


class Batcher(Generic[Item, Result]):
    """Items of one iteration of the event loop that share a script call: it reads what they have in common once."""

    def __init__(self, run: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]], at_most: int) -> None:
        """``run`` gives an answer to each of what it is given, in order: ``at_most`` at once."""
        self._run = run
        self._at_most = at_most
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._is_alone = False
        """Whether a call of one item is under way, which did not wait for others."""

    async def submit(self, item: Item) -> Result:
        """The result of the item. It is sent at once where no call is under way: an idle server need not wait for the
        end of the event loop's iteration."""
        # A call under way shows that the store is busy: items of one iteration then share the next call.
        if self._is_alone or self._waiting or self._calls:
            return await self.add(item)
        self._is_alone = True
        try:
            return (await self._run((item,)))[0]
        finally:
            self._is_alone = False

    def add(self, item: Item) -> asyncio.Future[Result]:
        """The future gets the answer."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        result = loop.create_future()
        self._waiting.append((item, result))
        return result

    def _send(self) -> None:
        # The list is swapped before anything is awaited: an item that comes during these calls belongs to the next
        # batch.
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), self._at_most):
            call = asyncio.create_task(self._call(waiting[first : first + self._at_most]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, waiting: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            replies = await self._run([item for item, _ in waiting])
        except Exception as error:
            for _, result in waiting:
                if not result.done():
                    result.set_exception(error)
            return
        for (_, result), reply in zip(waiting, replies, strict=True):
            if not result.done():
                result.set_result(reply)
