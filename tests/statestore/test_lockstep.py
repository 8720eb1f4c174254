"""A server within the process is a Redis server: driven in lockstep with one, the scripts never tell the difference.

Random traffic goes to both; every reply must agree, and after each step all that the two keep, key by key. The
sequences of calls are always the same, so that a run tells about the code and not about luck:
``DUALMAP_LOCKSTEP_SEED=7`` drives them through others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from glob import escape
from types import SimpleNamespace
from typing import Any

import pytest
import redis as redis_client

from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, Tier
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Form, Weights, features_of
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import Placement, PlaceReply, PlaceStatus
from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.queues.queue_order import DEFERRED_RANK_MS, PlanStep, QueuePlan, plan_queue
from dualmap.scheduling.request.metering import KEPT
from dualmap.scheduling.runs.turn import RunName, Turn, TurnEnd
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceState, Role
from dualmap.scheduling.state.legs import Leg, serves
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import at_once
from dualmap.scheduling.tenants.allotments import Division
from dualmap.scheduling.tenants.budgets import BudgetGroup, Draws, Limit, Measure, Period, budgets_of, drawn_text
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.keys import FleetKeys, PoolKeys
from dualmap.statestore.kv_views import KvChange, KvViewStatus, TierChange
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.memory.sorted_set import SortedSet
from dualmap.statestore.pool import PoolStore, scripts
from dualmap.statestore.pool.allotments import Allotment
from dualmap.statestore.pool.codec import CONFIRMED_STAMP, pairs_from
from dualmap.statestore.pool.runs import TurnStatus
from dualmap.statestore.records import pack_chain
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.tenants import tenant_book
from dualmap.statestore.tenants.tenant_book import Edition, TenantBook
from tests.statestore.samples import (
    DEADLINE,
    SCHEDULING,
    HandClock,
    assert_sums_hold,
    chain,
    drift,
    finish,
    first_token,
    instance,
    placement,
)

STEPS = 600
READ_EVERY = 8
"""Kept state is compared after every step, the replies of reading calls after so many."""
LOGGED = 50
"""Entries of each log that are compared: a server drops old ones later than it is asked to."""
INSTANCES = ("a", "b", "c", "d")
REPLICAS = ("one", "two")
DIVISION = Division(("default", "other"), 0, begins=True)
DRAWN = (Limit(Measure.TOKENS, Period.MINUTE, 9000), Limit(Measure.REQUESTS, Period.IN_FLIGHT, 5))
GIVEN_BACK = (
    Draws(BudgetGroup(budgets_of("acme", DRAWN)), (7, 1)),
    Draws(BudgetGroup(budgets_of("acme", DRAWN[:1])), (-9,)),
    Draws(BudgetGroup(budgets_of("acme", DRAWN[:1], DIVISION)), (-9,)),
)
CHAINS = (
    *(chain(1), chain(1, 2, 3), chain(1, 2, 3, 4, 5), chain(1, 2, 30, 40), chain(*range(70, 78))),
    *(chain(*range(100, 112)), chain(*range(100, 135)), chain(*range(100, 123), 201, 202)),  # several samples each
    *(chain(1, 2, 3, prompt_tokens=350), replace(chain(1, 2, 3, 4), block_tokens=37, prompt_tokens=160)),
)
SEED = int(os.environ.get("DUALMAP_LOCKSTEP_SEED", "1"))
TIGHT = {"max_deferred_s": 4.0}
FIFO, BY_DEADLINE = SCHEDULING.model_copy(update=TIGHT), DEADLINE.model_copy(update=TIGHT)
WANTED = {
    *PlaceStatus,
    "granted",
    "deferrals",
    "went beyond",
    "moved",
    "prefill of prefill",
    "whole of prefill",
    "decode of decode",
    "of the deferred",
    "first tokens",
    "confirmed",
    "weighed",
    "loaded",
    "allotted",
    "turn goes",
    "turn waits",
}
"""What traffic has to have led to before it proves anything."""
ROOMY = {"role": Role.MIXED, "max_queued_requests": 4, "max_running_requests": 6}


@pytest.fixture(autouse=True)
def bounds_that_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "PREFIX_SAMPLES", 5)
    monkeypatch.setattr(scripts, "WINDOW_REQUESTS", 100)
    monkeypatch.setattr(scripts, "MAX_RUNS", 8)
    monkeypatch.setattr(scripts, "MAX_BRANCHES", 3)
    monkeypatch.setattr(scripts, "MAX_CONTEXTS", 4)


class Twins:
    """One pool in memory and one on a server, with one clock."""

    def __init__(self, server_url: str, scheduling: SchedulingSettings) -> None:
        self.clock = HandClock()
        self.order = queue_order_of(scheduling)
        self.keys = PoolKeys("dualmap", "default")
        self.client: Any = redis_client.Redis.from_url(server_url)
        in_memory = MemoryStore(scheduling, now_ms=self.clock)
        self.server, self.memory = in_memory.server, in_memory.pool("default")
        settings = StoreSettings(url=server_url, command_timeout_s=10.0)
        self.store = RedisStore(settings, scheduling=scheduling, own_clock=self.clock)
        self.redis = self.store.pool("default")
        self.books: tuple[TenantBook, TenantBook] = (in_memory.tenants, self.store.tenants)
        self.granted: dict[str, list[Grant]] = {"memory": [], "redis": []}

    async def open(self) -> None:
        await self.store.open()
        for replica_id in REPLICAS:
            self.memory.on_grant(replica_id, self.granted["memory"].append)
            self.redis.on_grant(replica_id, self.granted["redis"].append)
        channels = [self.keys.grants(replica_id) for replica_id in REPLICAS]
        async with asyncio.timeout(60):
            while any(count < 1 for _, count in self.client.pubsub_numsub(*channels)):  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        await self.store.close()
        self.client.close()

    async def both(self, call: Callable[[PoolStore], Awaitable[Any]]) -> Any:
        """The answer of both, which must be the same, errors included."""

        async def answer(pool: PoolStore) -> Any:
            try:
                return await call(pool)
            except LeaseLostError:
                return LeaseLostError

        memory, redis = await answer(self.memory), await answer(self.redis)
        assert plain(redis) == plain(memory)
        return memory

    # what must hold after every step -------------------------------------------------------------------------
    def same_is_kept(self) -> None:
        assert self.kept_in_memory() == self.kept_on_the_server()

    async def same_is_read(self) -> None:
        """Every reading call, which sees nothing but what is kept, replies the same."""
        await self.both(lambda pool: pool.snapshot())
        await self.both(lambda pool: pool.overview())
        await self.both(lambda pool: pool.membership())
        await self.both(lambda pool: pool.kv_events.records())
        await self.both(lambda pool: pool.runs.ledger())
        await assert_sums_hold(self.redis)
        for name in (await self.redis.membership()).instances:
            await self.both(lambda pool, name=name: pool.queues.queue(name))
            await self.both(lambda pool, name=name: pool.queue_head(name))

    def kept_on_the_server(self) -> dict[bytes, Any]:
        """All keys."""
        keys = [*self.client.scan_iter(escape(self.keys.base) + b"*", count=10_000)]
        with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.type(key)
            kinds = pipeline.execute()
            for key, kind in zip(keys, kinds, strict=True):
                match kind:
                    case b"hash":
                        pipeline.hgetall(key)
                    case b"zset":
                        pipeline.zrange(key, 0, -1, withscores=True)
                    case b"list":
                        pipeline.lrange(key, 0, -1)
                    case b"stream":
                        pipeline.xrevrange(key, count=LOGGED)
            kept = dict(zip(keys, pipeline.execute(), strict=True))
        streams = {key: kept[key] for key, kind in zip(keys, kinds, strict=True) if kind == b"stream"}
        return kept | {key: [fields for _, fields in reversed(entries)] for key, entries in streams.items()}

    def kept_in_memory(self) -> dict[bytes, Any]:
        run = self.server.run
        kept: dict[bytes, Any] = {}
        for key, content in self.server.contents.items():
            match content:
                case dict():
                    kept[key] = pairs_from(run(b"HGETALL", key))
                case SortedSet():
                    flat = run(b"ZRANGE", key, 0, -1, b"WITHSCORES")
                    kept[key] = [(member, float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)]
                case list():
                    kept[key] = run(b"LRANGE", key, 0, -1)
                case deque():
                    entries = run(b"XRANGE", key, b"(0", b"+", b"COUNT", 10_000)
                    kept[key] = [pairs_from(fields) for _, fields in entries][-LOGGED:]
        return {key: content for key, content in kept.items() if content}

    async def logs_agree(self) -> None:
        arrivals = [
            [(each.at_ms, each.head) for each in await pool.publications.arrivals("0", 1000)]
            for pool in (self.memory, self.redis)
        ]
        assert arrivals[0] == arrivals[1][-len(arrivals[0]) :]
        contents = [
            [each.content for each in await pool.publications.samples("0", 1000)] for pool in (self.memory, self.redis)
        ]
        assert contents[0] == contents[1]
        assert contents[0]
        async with asyncio.timeout(60):
            while len(self.granted["redis"]) < len(self.granted["memory"]):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert sorted(self.granted["redis"], key=repr) == sorted(self.granted["memory"], key=repr)


def plain(answer: Any) -> Any:
    """An answer as comparable parts: floats to nine digits; what each reader tells from its own memory is left out."""
    if isinstance(answer, Mapping):
        return {key: plain(value) for key, value in answer.items()}
    if isinstance(answer, (list, tuple)):
        return [plain(value) for value in answer]
    if isinstance(answer, float):
        return pytest.approx(answer, rel=1e-9, abs=1e-9)
    if hasattr(answer, "__dataclass_fields__"):
        return plain({name: getattr(answer, name) for name in answer.__dataclass_fields__ if name != "window_tokens"})
    return answer


def _with_all_after(block: int) -> tuple[int, ...]:
    """The block and every one that continues it: what an engine holds is closed under prefixes."""
    tails = [each.hashes[each.hashes.index(block) :] for each in CHAINS if block in each.hashes]
    return tuple(sorted({one for tail in tails for one in tail}))


class Traffic:
    """Draws one call after another, with the weights of a busy fleet, and makes it on both."""

    def __init__(self, twins: Twins, scheduling: SchedulingSettings, seed: int) -> None:
        self.twins = twins
        self.rng = random.Random(seed)
        self.groups_rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        """The outcomes of the traffic, so that a test can tell whether it was worth anything."""
        self.steps = 0
        self.stall_from_s = scheduling.decode_stall_s
        self.fence = 0
        self.number = 0
        self.turns: list[Turn] = []
        """The last turns."""
        self.calls: dict[Callable[[], Awaitable[object]], int] = {
            self.arrive: 36,
            self.pass_time: 14,
            self.plan: 18,
            self.plan_anything: 7,
            self.first_token: 12,
            self.finish: 14,
            self.migrate: 8,
            self.retry: 4,
            self.repeat: 4,
            self.observe: 3,
            self.adopt: 2,
            self.stray: 3,
            self.change_instance: 3,
            self.make_ready: 3,
            self.beat_or_retire: 2,
            self.reap: 1,
            self.lead: 2,
            self.publish: 2,
            self.drift_and_repair: 2,
            self.take_wishes: 1,
            self.allot: 1,
            self.kv_events: 8,
            self.tiers: 2,
            self.admit_turns: 12,
            self.end_turn: 10,
        }

    async def step(self) -> None:
        (call,) = self.rng.choices([*self.calls], [*self.calls.values()])
        await call()
        self.twins.same_is_kept()
        self.steps += 1
        if self.steps % READ_EVERY == 0:
            await self.twins.same_is_read()

    async def begin(self) -> None:
        await self.lead()
        for name in INSTANCES:
            spec = instance(name, kv_capacity_tokens=900, dispatch_window_tokens=500, max_queued_requests=8)
            await self.twins.both(lambda pool, spec=spec: pool.members.put_instance(spec))

    # requests ------------------------------------------------------------------------------------------------
    def weights(self) -> Weights:
        """Of every feature now and then; mostly such that load counts against an instance."""
        rng = self.rng

        def form(*likely: str) -> Form:
            chosen = dict.fromkeys([*likely, *rng.sample(Form._fields, rng.randrange(3))])  # in order: no set's
            return Form(**{name: rng.uniform(-0.2, 3.0) for name in chosen})

        return Weights(form("ahead_s", "compute_s"), form("ahead_s", "compute_s"), form("constant"))

    def legs(self) -> dict[str, Any]:
        """Now and then a decode leg, or a request that may be split."""
        rng = self.rng
        leg = rng.choice((Leg.WHOLE, Leg.WHOLE, Leg.DECODE, Leg.PREFILL))
        if leg is not Leg.PREFILL:
            return {"leg": leg}
        named, beyond_from_s = tuple(rng.sample(INSTANCES, rng.randrange(1, 4))), rng.choice((None, 0.0))
        decider = Form(uncached_tokens=1.0, ahead_s=rng.uniform(0.0, 100.0))
        other = Weighing(Leg.WHOLE, named, self.weights(), decider, beyond_from_s, (Role.DECODE, Role.MIXED))
        decider = Form(constant=rng.uniform(0.0, 900.0), decoding_compute_s=1.0, running_share=9.0, prompt_tokens=0.1)
        return {"leg": leg, "decider": decider, "other": other}

    def draws(self) -> dict[str, Any]:
        """Now and then what a tenant's limits say."""
        rng = self.rng
        if rng.random() < 0.6:
            return {}
        division = rng.choice((None, DIVISION))
        budgets = budgets_of("acme", rng.sample(DRAWN, rng.randrange(1, 3)), division)
        draws = BudgetGroup(budgets).draws(rng.randrange(1, 4000), 50)
        return {
            "tenant": "acme",
            "drawn": drawn_text(draws),
            "draws": draws,
            "must_draw": rng.random() < 0.2,
            "account": "acme ci - m",
        }

    async def arrive(self, **changes: Any) -> PlaceReply:
        rng = self.rng
        self.number += 1
        named = rng.sample((*INSTANCES, "nobody"), rng.randrange(1, 5))
        slo_ms = rng.choice((20, 150, 500, 2000, 60_000))
        request_chain: Chain = rng.choice(CHAINS)
        asked: dict[str, Any] = {
            "replica_id": rng.choice(REPLICAS),
            "chain": request_chain,
            "slo_ms": slo_ms,
            "rank_ms": self.twins.order.rank_ms(slo_ms),
            "weights": self.weights(),
            "excluded": frozenset(rng.sample(INSTANCES, rng.choice((0, 0, 0, 1, 2)))),
            "beyond_from_s": rng.choice((None, None, 0.0, 0.01)),
            "defers": rng.random() < 0.5,
            "at_once": rng.random() < 0.3,
            "refuses": rng.random() < 0.2,
            "rebalances": rng.random() < 0.2,
            "max_pending_tokens": rng.choice((None, None, None, 600)),
            "hot_tokens": rng.choice((0, 0, request_chain.prompt_tokens // 2)),
            **self.legs(),
            **self.draws(),
            **changes,
        }
        request_id = asked.pop("request_id", f"r{self.number}")
        if rng.random() < 0.2:
            asked["turn"] = self.turn(request_id, asked["replica_id"], asked["chain"])
            asked["memory_tokens"] = rng.choice((900, 900, 2000))
            self.turns = [*self.turns, asked["turn"]][-20:]
        made = placement(request_id, *named, **asked)
        reply: PlaceReply = await self.twins.both(lambda pool: pool.place(made))
        self.seen[reply.status] += 1
        self.seen["went beyond"] += reply.chosen.instance_id is not None and reply.chosen.instance_id not in named
        if reply.chosen.instance_id is not None and reply.status in (PlaceStatus.DISPATCHED, PlaceStatus.HELD):
            self.seen[f"{reply.chosen.leg} of {made.weighing.leg}"] += 1
            if made.request.request_id == f"r{self.number}" and made.other is None:
                await self.is_weighed_rightly(made, reply)
        return reply

    async def is_weighed_rightly(self, made: Placement, reply: PlaceReply) -> None:
        """The scripts weigh as ``scheduling.estimates.weights`` does: that one explains, and learns the weights."""
        specs, slo_s = (await self.twins.memory.membership()).instances, made.request.slo_ms / 1000
        features = {
            name: features_of(load, made.chain, self.stall_from_s, made.hot_tokens)
            for name, load in reply.seen.loads.items()
        }
        takes = {name for name in features if specs[name].state is InstanceState.READY}
        takes = {name for name in takes if serves(specs[name].role, made.weighing.leg)}
        costs = {name: made.weighing.weights.cost_of(features[name], slo_s) for name in takes}
        assert costs[reply.chosen.instance_id] == pytest.approx(min(costs.values()))
        assert reply.chosen.ttft_s == pytest.approx(made.weighing.weights.ttft.of(features[reply.chosen.instance_id]))
        assert reply.chosen.is_hybrid is (reply.seen.loads[reply.chosen.instance_id].hit_step_tokens > 0)
        self.seen["weighed"] += len(costs) > 1
        self.seen["loaded"] += any(load.tiers.blocks for load in reply.seen.loads.values())

    def pick(self, *states: RequestState) -> StoredRequest | None:
        """One of the live requests: calls that would mostly miss would prove little."""
        live = [
            each for each in at_once(self.twins.memory.snapshot()).requests if each.state in (states or [*RequestState])
        ]
        return self.rng.choice(live) if live else None

    async def repeat(self) -> None:
        if request := self.pick():
            named: dict[str, Any] = {"request_id": request.request_id, "replica_id": request.replica_id}
            named["attempt"] = request.attempt + (self.rng.random() < 0.3)
            await self.arrive(**named)

    async def retry(self) -> None:
        if request := self.pick():
            kept = self.number % 2 == 0
            await self.finish(request, KEPT if kept else None)
            if kept:
                await self.twins.both(lambda pool: pool.requests_of(request.replica_id))
            named = {"request_id": request.request_id, "replica_id": request.replica_id}
            await self.arrive(**named, attempt=request.attempt + 1, enqueued_ms=request.enqueued_ms)

    async def first_token(self) -> None:
        if request := self.pick(RequestState.DISPATCHED):
            note = self.rng.choice(("", '{"features":null}', '{"features":[1.0,0.25]}'))
            await self.twins.both(lambda pool: first_token(pool, request.request_id, request.instance_id, note=note))
            self.seen["first tokens"] += 1

    async def finish(self, request: StoredRequest | None = None, used: str | None = None) -> None:
        request = request or self.pick()
        if request is not None:
            note, returned = (
                self.rng.choice(("", '{"text_bytes":900,"tokens":200}')),
                self.rng.choice((None, *GIVEN_BACK)),
            )
            if used is None:
                used = "1 200 0 30 0 0 0 completed reported" if returned else ""
            name, about = request.request_id, {"replica_id": request.replica_id, "attempt": request.attempt}
            await self.twins.both(lambda pool: finish(pool, name, note=note, returned=returned, used=used, **about))

    async def observe(self) -> None:
        named, request_chain = self.rng.sample(INSTANCES, 3), self.rng.choice(CHAINS)
        await self.twins.both(lambda pool: pool.observe(named, request_chain))

    # runs ----------------------------------------------------------------------------------------------------
    async def admit_turns(self) -> None:
        """New turns and repeated ones, of few runs, with names or without, on the memory of few of them."""
        rng, turns = self.rng, []
        for _ in range(rng.randrange(1, 4)):
            if self.turns and rng.random() < 0.3:
                turns.append(rng.choice(self.turns))
                continue
            self.number += 1
            turns.append(self.turn(f"r{self.number}", rng.choice(REPLICAS), rng.choice(CHAINS)))
        self.turns = [*self.turns, *turns][-20:]
        capacity_tokens = rng.choice((900, 900, 2000))
        statuses = await self.twins.both(lambda pool: pool.runs.admit(turns, capacity_tokens))
        self.seen.update(f"turn {status.name.lower()}" for status in statuses)
        for turn, status in zip(turns, statuses, strict=True):
            if status is TurnStatus.GOES and rng.random() < 0.5:
                await self.arrive(request_id=turn.turn_id, replica_id=turn.replica_id, chain=turn.chain)

    def turn(self, turn_id: str, replica_id: str, request_chain: Chain) -> Turn:
        rng = self.rng
        run = rng.choice(("", "one", "two", "three", "four", f"new{self.number}"))
        name = RunName(run, rng.choice(("", "sub1", "sub2")) if run else "", rng.choice(("", "parent")))
        return Turn(
            turn_id,
            replica_id,
            name,
            request_chain,
            rng.choice((0.0, 0.3, 1000.0)),
            tenant=rng.choice(("", "acme")),
            stored_tokens=rng.choice((0, 0, 0, 400)),
        )

    async def end_turn(self) -> None:
        if self.turns:
            turn, rng = self.rng.choice(self.turns), self.rng
            over = TurnEnd(turn.turn_id, turn.replica_id, rng.choice((0, 20, 300)), was_sent=rng.random() < 0.9)
            await self.twins.both(lambda pool: finish(pool, turn.turn_id, replica_id=turn.replica_id, turn=over))
            await self.twins.both(lambda pool: pool.runs.turns_of(turn.replica_id))

    # queues --------------------------------------------------------------------------------------------------
    async def plan(self) -> None:
        """As a replica or the leader would."""
        name = self.rng.choice(INSTANCES)
        queue = await self.twins.memory.queue_head(name)
        if queue is not None:
            await self.commit(plan_queue(queue, self.twins.order))

    async def plan_anything(self) -> None:
        """Steps of any kind for any requests, for the version as it is or another one."""
        name, rng = self.rng.choice(INSTANCES), self.rng
        queue = await self.twins.memory.queue_head(name)
        if queue is None:
            return
        names = [entry.request_id for entry in queue.entries] + [*rng.sample(sorted(self._names()), 1)]
        steps = []
        for request_id in rng.sample(names, rng.randrange(len(names) + 1)):
            deferred_to_ms = rng.choice((None, None, DEFERRED_RANK_MS + queue.now_ms, queue.now_ms + 70))
            steps.append(PlanStep(request_id, deferred_to_ms))
        steps += [PlanStep(entry.request_id) for entry in queue.entries if entry.deferred and rng.random() < 0.2]
        version, passed_over_tokens = queue.load.version - (rng.random() < 0.2), rng.choice((0, 0, 300))
        await self.commit(QueuePlan(name, version, tuple(steps), passed_over_tokens))

    def _names(self) -> set[str]:
        return {"nobody", *(each.request_id for each in at_once(self.twins.memory.snapshot()).requests)}

    async def commit(self, plan: QueuePlan) -> None:
        replica_id = self.rng.choice(("", *REPLICAS))
        reply = await self.twins.both(lambda pool: pool.commit(plan, replica_id=replica_id))
        self.seen["granted"] += len(reply.grants)
        self.seen["of the deferred"] += sum(grant.deferred for grant in reply.grants)
        self.seen["deferrals"] += sum(step.deferred_to_ms is not None for step in plan.steps)

    async def migrate(self) -> None:
        if request := self.pick(RequestState.HELD):
            target_id, fence = self.rng.choice(INSTANCES), self.fence - (self.rng.random() < 0.1)
            moved = await self.twins.both(
                lambda pool: pool.queues.migrate(request, target_id, reason="benefit", fence=fence)
            )
            self.seen["moved"] += moved is not LeaseLostError and moved.status == "migrated"

    async def adopt(self) -> None:
        rng, at_ms = self.rng, self.twins.clock.now_ms - 50
        state = rng.choice([*RequestState])
        self.number += 1
        made = StoredRequest(
            f"adopted{self.number}",
            rng.choice(REPLICAS),
            rng.choice(INSTANCES),
            state,
            attempt=1,
            uncached_tokens=300,
            prompt_tokens=350,
            expected_output_tokens=20,
            slo_ms=5000,
            enqueued_ms=at_ms,
            dispatched_ms=0 if state is RequestState.HELD else at_ms,
            prefilled_ms=at_ms if state is RequestState.PREFILLED else 0,
            alternative_id=rng.choice((None, "b")),
            deferred=state is RequestState.HELD and rng.random() < 0.5,
            leg=rng.choice([*Leg]),
        )
        known = self.pick()
        await self.twins.both(lambda pool: pool.adopt([made, *([known] if known else [])]))

    async def stray(self) -> None:
        """Calls that come too late, or from somewhere else."""
        rng, name = self.rng, self.rng.choice(sorted(self._names()))
        instance_id, replica_id = rng.choice(INSTANCES), rng.choice(REPLICAS)
        await self.twins.both(lambda pool: first_token(pool, name, instance_id))
        await self.twins.both(lambda pool: finish(pool, name, replica_id=replica_id, attempt=1))

    # members, leases, upkeep ---------------------------------------------------------------------------------
    async def change_instance(self) -> None:
        rng, name = self.rng, self.rng.choice(INSTANCES)
        match rng.randrange(4):
            case 0:
                state, expected = rng.choice([*InstanceState]), rng.choice((None, *InstanceState))
                await self.twins.both(lambda pool: pool.members.set_instance_state(name, state, expected=expected))
            case 1:
                spec = instance(
                    name,
                    role=rng.choice((Role.MIXED, Role.MIXED, Role.DECODE, Role.PREFILL)),
                    dispatch_window_tokens=rng.choice((1, 500, 2000)),
                    max_running_requests=rng.randrange(1, 5),
                    kv_capacity_tokens=rng.choice((50, 900, 2500)),
                )
                await self.twins.both(lambda pool: pool.members.put_instance(spec))
            case 2:
                changes = {"max_queued_requests": rng.randrange(9), "prefill_tokens_per_s": rng.choice((90.0, 8000.0))}
                await self.twins.both(lambda pool: pool.members.update_instance(name, changes, fence=self.fence))
            case _:
                await self.twins.both(lambda pool: pool.members.remove_instance(name))

    async def make_ready(self) -> None:
        for name in INSTANCES:
            if name not in (await self.twins.memory.membership()).instances:
                await self.twins.both(
                    lambda pool, name=name: pool.members.put_instance(instance(name, kv_capacity_tokens=900))
                )
            await self.twins.both(lambda pool, name=name: pool.members.update_instance(name, ROOMY))
            await self.twins.both(lambda pool, name=name: pool.members.set_instance_state(name, InstanceState.READY))

    async def pass_time(self) -> None:
        self.twins.clock.advance(self.rng.choice((1, 10, 50, 100, 400, 400, 4000, 9000, -300)))

    async def beat_or_retire(self) -> None:
        replica_id, lease_ms = self.rng.choice(REPLICAS), self.rng.randrange(1, 60_000)
        if self.rng.random() < 0.2:
            await self.twins.both(lambda pool: pool.retire(replica_id))
        else:
            info = {"pid": "7", "note": 'quoted "expires_ms":1'}
            await self.twins.both(lambda pool: pool.heartbeat(replica_id, lease_ms, info))
        await self.twins.both(lambda pool: pool.upkeep.expired_replicas())
        await self.twins.both(lambda pool: pool.requests_of(replica_id))

    async def reap(self) -> None:
        for replica_id in REPLICAS:
            reaped = await self.twins.both(lambda pool, name=replica_id: pool.upkeep.reap(name, fence=self.fence))
            self.seen["reaped"] += reaped is not LeaseLostError and reaped

    async def lead(self) -> None:
        owner, lease_ms = self.rng.choice(("worker-1", "worker-2")), self.rng.choice((500, 60_000, 3_600_000))
        lease = await self.twins.both(lambda pool: pool.leader_lease.acquire(owner, lease_ms))
        if lease is not None:
            self.fence = lease.fence
            if self.rng.random() < 0.1:
                await self.twins.both(lambda pool: pool.leader_lease.release(lease))
            else:
                await self.twins.both(lambda pool: pool.leader_lease.renew(lease, lease_ms))

    async def kv_events(self) -> None:
        """What a subscriber does, with the claim that there is or with a former one."""
        rng, name = self.rng, self.rng.choice((*INSTANCES, "nobody"))
        worker_id, lease_ms = rng.choice(("worker-1", "worker-2")), rng.choice((0, 2000, 60_000))
        await self.twins.both(lambda pool: pool.kv_events.renew_subscriber(worker_id, lease_ms))
        if rng.random() < 0.4:
            await self.twins.both(lambda pool: pool.kv_events.claim(name, worker_id))
        known = (await self.twins.memory.kv_events.records()).get(name)
        fence = (known.fence if known else 7) - (rng.random() < 0.1)
        if rng.random() < 0.3:
            status, drop = rng.choice([*KvViewStatus]), rng.random() < 0.2
            await self.twins.both(lambda pool: pool.kv_events.mark(name, fence, status, "a reason", drop=drop))
        blocks, gone = rng.choice(CHAINS).hashes, rng.choice(rng.choice(CHAINS).hashes)
        stored = blocks[: rng.randrange(len(blocks) + 1)] if rng.random() < 0.6 else ()
        removed = _with_all_after(gone) if not stored else ()
        if removed and rng.random() < 0.5:  # an engine knows of no bookings: those behind what it evicts stay
            stamps = self.twins.client.zmscore(self.twins.keys.kv(name), [pack_chain((block,)) for block in removed])
            removed = tuple(
                block for block, stamp in zip(removed, stamps, strict=True) if stamp and stamp >= CONFIRMED_STAMP
            )
        names = {b"%d" % block: rng.choice((b"", b"known")) for block in blocks}
        few = self.groups_rng.random() < 0.3
        inner = [block for block in stored if few and self.groups_rng.random() < 0.4]
        ends = [block for block in stored if block not in inner]
        step = self.groups_rng.choice((0, 0, 100, 200))
        groups = {"inner": inner, "turned": self.groups_rng.randrange(2), "hit_step_tokens": step}
        kept = TierChange(stored, removed, self.groups_rng.randrange(1, 12))
        groups["tiers"] = {self.groups_rng.choice([*Tier]): kept} if self.groups_rng.random() < 0.5 else {}
        change = KvChange(rng.randrange(100), rng.random(), ends, removed, names, rng.random() < 0.1, **groups)
        booked = await self.twins.both(lambda pool: pool.kv_events.apply(name, fence, change))
        self.seen["confirmed"] += booked is not LeaseLostError and booked
        await self.twins.both(lambda pool: pool.kv_events.names(name))
        if rng.random() < 0.1:
            await self.twins.both(lambda pool: pool.kv_events.release(name, fence))

    async def tiers(self) -> None:
        """An instance has tiers behind its device, or none any more."""
        rng, name = self.rng, self.rng.choice((*INSTANCES, "nobody"))
        prices = [LoadPrice(rng.choice((0.0, 0.02)), rng.choice((1e-6, 1e-4, 1e-2))) for _ in Tier]
        each = [InstanceTier(tier, rng.randrange(100, 2000), price) for tier, price in zip(Tier, prices, strict=True)]
        described = InstanceTiers(tuple(each[: rng.randrange(len(each) + 1)]), takes_limits=rng.random() < 0.8)
        await self.twins.both(lambda pool: pool.tiers.describe(name, described, fence=self.fence))

    async def publish(self) -> None:
        rng = self.rng
        hot = {rng.choice((2**64 - 1, 5, 6)): rng.randrange(1, 4)}
        await self.twins.both(lambda pool: pool.publications.publish_tree(HotnessTree(hot), {}, fence=self.fence))
        learned, rates = Learned(rng.uniform(2, 5)), {rng.choice(INSTANCES): rng.uniform(100, 9000)}
        await self.twins.both(lambda pool: pool.publications.publish_learned(learned, rates, fence=self.fence))

    async def drift_and_repair(self) -> None:
        name, by = self.rng.choice(INSTANCES), self.rng.randrange(1, 300)
        count = self.rng.choice(("pending_tokens", "dispatched_tokens", "deferred_tokens", "context_tokens"))
        if name not in (await self.twins.memory.membership()).instances:
            return
        for pool in (self.twins.memory, self.twins.redis):
            await drift(pool, name, count, by)
        repaired = await self.twins.both(lambda pool: pool.upkeep.repair(fence=self.fence))
        if repaired is LeaseLostError:
            for pool in (self.twins.memory, self.twins.redis):
                await drift(pool, name, count, -by)
        else:
            assert repaired == 1

    async def allot(self) -> None:
        rng, pool = self.rng, self.twins.memory
        wanted = await self.twins.both(lambda pool: pool.allotments.wanted())
        for budget, each in wanted.items():
            found = await pool.allotments.of(budget, each.amount, each.amount // 2)
            stamp, part = found.stamp + rng.choice((0, 1, 1, 2)), rng.randrange(each.amount + 1)
            change = Allotment(budget, each.amount, each.amount // 2, stamp, part, rng.randrange(9))
            await self.twins.both(lambda pool, change=change: pool.allotments.allot(change))
            self.seen["allotted"] += 1
            await self.twins.both(lambda pool, budget=budget, amount=each.amount: pool.allotments.of(budget, amount, 7))

    async def take_wishes(self) -> None:
        await self.twins.both(lambda pool: pool.queues.wanted_rebalances(0))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("server_kind", "scheduling"),
    [("valkey", FIFO), ("valkey", BY_DEADLINE), ("redis-6.2", BY_DEADLINE)],
    ids=["valkey-fifo", "valkey-deadline", "redis-6.2-deadline"],
    indirect=["server_kind"],
)
async def test_memory_and_a_server_agree_on_every_call(server_url: str, scheduling: SchedulingSettings) -> None:
    twins = Twins(server_url, scheduling)
    await twins.open()
    try:
        traffic = Traffic(twins, scheduling, SEED)
        await traffic.begin()
        for number in range(8 * STEPS):
            if number >= STEPS and all(traffic.seen[name] for name in WANTED):
                break
            await traffic.step()
        await twins.logs_agree()
    finally:
        await twins.close()

    assert WANTED - {name for name, count in traffic.seen.items() if count} == set()


# the book of tenants -----------------------------------------------------------------------------------------------
TENANTS = ("acme", "other", "a.b-c_d", "Zürich", 'quoted " and \\\\', "fourth", "fifth")


class TenantTraffic:
    """Changes of tenants as administrators and replicas make them, on an edition that is the present one or not, and
    reads of those who know any edition, while the book is lost now and then."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self.twins = twins
        self.rng = random.Random(seed)
        self.editions = [Edition(), Edition(3, "of another book")]
        self.seen: Counter[str] = Counter()

    async def both(self, call: Callable[[TenantBook], Awaitable[Any]]) -> Any:
        memory, redis = [await call(book) for book in self.twins.books]
        assert plain(redis) == plain(memory)
        return memory

    async def step(self) -> None:
        (call,) = self.rng.choices([self.change, self.read, self.lose, self.pass_time], [10, 8, 0.3, 2])
        await call()
        self.twins.same_is_kept()

    def known(self) -> Edition:
        return self.editions[-1] if self.rng.random() < 0.7 else self.rng.choice(self.editions)

    async def change(self) -> None:
        rng, known = self.rng, self.known()
        names = rng.sample(TENANTS, rng.choice((1, 1, 1, 3)))
        texts = {name: rng.choice((None, b"", b'{"weight":2.0}', "é".encode())) for name in names}
        about: dict[str, Any] = {"by": rng.choice(("ada", "")), "action": "set", "before": {}, "after": {"weight": 0.1}}
        beyond = rng.choice((0, 0, 0, known.number + 4))
        made = await self.both(lambda book: book.change(known, texts, beyond=beyond, **about))
        self.seen["refused" if made is None else "made"] += 1
        if made is not None:
            self.editions.append(made)

    async def read(self) -> None:
        known, limit = self.rng.choice((None, self.known())), self.rng.choice((1, 5, 1000))
        news = await self.both(lambda book: book.news(known))
        self.seen["lost" if news.lost else "whole" if news.whole else "since" if news.texts else "no news"] += 1
        await self.both(lambda book: book.history(limit))

    async def lose(self) -> None:
        keys = FleetKeys("dualmap")
        for key in (keys.tenants, keys.tenants_meta, keys.tenants_history):
            self.twins.server.run(b"DEL", key)
            self.twins.client.delete(key)
        self.editions.append(Edition())

    async def pass_time(self) -> None:
        self.twins.clock.advance(self.rng.choice((1, 400, 9000, -300)))
        await self.both(lambda book: book.now_ms())


@pytest.mark.parametrize("server_kind", ["valkey", "redis-6.2"], indirect=True)
async def test_memory_and_a_server_agree_on_the_book_of_tenants(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_book, "LOGGED_CHANGES", 12)
    monkeypatch.setattr(tenant_book, "READ_TOGETHER", 2)
    drawn = itertools.count()
    tokens = SimpleNamespace(token_hex=lambda _: f"{next(drawn) // 2:016x}")  # each for both books
    monkeypatch.setattr(tenant_book, "secrets", tokens)
    twins = Twins(server_url, FIFO)
    await twins.open()
    twins.keys = FleetKeys("dualmap")
    try:
        traffic = TenantTraffic(twins, SEED)
        for _ in range(STEPS // 2):
            await traffic.step()
    finally:
        await twins.close()

    assert {"made", "refused", "lost", "whole", "since", "no news"} - {*traffic.seen} == set()
