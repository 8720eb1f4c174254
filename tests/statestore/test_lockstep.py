"""The in-memory ledger and the Lua scripts are twins: driven in lockstep they never differ.

The sequences of calls are always the same, so that a run tells about the code and not about luck.
``DUALMAP_LOCKSTEP_SEED=7`` drives the twins through others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
import redis as redis_client
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from scheduling.chain import Chain
from scheduling.decision import Decision, RouteQuery
from scheduling.hotness import HotnessTree
from scheduling.idle_holder import idle_holder_cost
from scheduling.instance import InstanceState, Role
from scheduling.policies import build_policy
from scheduling.queue_order import has_room_to_spare
from scheduling.settings import SchedulingSettings
from scheduling.ttft_model import TtftFeatures
from statestore.base import FinishFacts, Grant, PoolStore, RequestRecord, RequestState
from statestore.embedded import EmbeddedValkey
from statestore.errors import StoreError
from statestore.keys import PoolKeys
from statestore.leases import Lease
from statestore.ledger.account import InstanceAccount
from statestore.ledger.live import LiveRequest
from statestore.memory import MemoryStore
from statestore.redis import RedisStore
from statestore.redis.codec import unpack_chain
from statestore.reservation import Newcomer
from statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, HandClock, chain, instance, reservation

INSTANCES = ("a", "b", "c")
REPLICAS = ("one", "two")
REQUESTS = tuple(f"r{number}" for number in range(8))
CHAINS = (
    *(chain(1), chain(1, 2, 3), chain(1, 2, 3, 4, 5), chain(1, 2, 30, 40), chain(*range(70, 78))),
    *(chain(*range(100, 112)), chain(*range(100, 135)), chain(*range(100, 123), 201, 202)),  # several marks each
)
DEADLINE = SCHEDULING.model_copy(
    update={
        "policy": "dualmap-wide",
        "queue_order": "deadline",
        "max_hold_s": 20.0,
        "max_late_work_s": 4.0,
        "late_work_share": 0.2,
        "holder_marks": 5,
    }
)

instances = st.sampled_from(INSTANCES)
replicas = st.sampled_from(REPLICAS)
requests = st.sampled_from(REQUESTS)
chains = st.sampled_from(CHAINS)
states = st.sampled_from(InstanceState)
roles = st.sampled_from((Role.MIXED, Role.PREFILL, Role.DECODE))
attempts = st.integers(1, 3)
slos_ms = st.sampled_from((20, 80, 500, 5000, 60_000))
picks = st.integers(0, 7)
uncached_tokens = st.integers(1, 600)
pairs = st.sampled_from((("a", "b"), ("b", "a"), ("b", "c"), ("a",)))
ready_instances = st.sampled_from(("a", "b"))
ttft_features = st.none() | st.builds(
    TtftFeatures,
    queueing_ms=st.integers(0, 30_000),
    compute_ms=st.integers(0, 3000),
    attention_million_pairs=st.integers(0, 500),
    context_tokens=st.integers(0, 1_000_000),
)
finish_facts = st.none() | st.builds(FinishFacts, st.integers(60_000, 90_000), st.integers(17_000, 20_000))
changes_of_instances = st.fixed_dictionaries(
    {},
    optional={
        "role": roles,
        "dispatch_window_tokens": st.sampled_from((1, 500, 2000)),
        "max_running_requests": st.integers(1, 3),
        "kv_capacity_tokens": st.sampled_from((0, 300, 900)),
        "prefill_tokens_per_s": st.sampled_from((100.0, 8000.0)),
    },
)
prefixes = itertools.count()
SEED = os.environ.get("DUALMAP_LOCKSTEP_SEED")


class Twins(RuleBasedStateMachine):
    """Every rule goes to both stores, and the answers must agree; then all that they keep must."""

    server: EmbeddedValkey
    scheduling = SCHEDULING

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = HandClock()
        self.prefix = f"twins{next(prefixes)}"
        self.keys = PoolKeys(self.prefix, "default")
        self.client: Any = redis_client.Redis.from_url(self.server.url)
        store_settings = StoreSettings(url=self.server.url, prefix=self.prefix, command_timeout_s=10.0)
        self.memory_store = MemoryStore(self.scheduling, now_ms=self.clock)
        self.redis_store = RedisStore(store_settings, scheduling=self.scheduling, test_clock=self.clock)
        self.memory = self.memory_store.pool("default")
        self.redis = self.redis_store.pool("default")
        self.grants: dict[str, list[Grant]] = {"memory": [], "redis": []}
        self.fence = 0
        self.lease = Lease("nobody", 0, 0)
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        await self.redis_store.open()
        self.readers = [
            asyncio.create_task(self._read_grants(name, pool, replica_id))
            for name, pool in (("memory", self.memory), ("redis", self.redis))
            for replica_id in REPLICAS
        ]
        subscribed = self.keys.grants_channel_of(REPLICAS[1])
        async with asyncio.timeout(5):
            while self.client.pubsub_numsub(subscribed)[0][1] < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def _read_grants(self, name: str, pool: PoolStore, replica_id: str) -> None:
        async for grant in pool.grants(replica_id):
            self.grants[name].append(grant)

    def teardown(self) -> None:
        self.loop.run_until_complete(self._close())
        self.loop.close()
        for key in self.client.scan_iter(f"{self.prefix}:*"):
            self.client.delete(key)
        self.client.close()

    async def _close(self) -> None:
        await self.redis_store.close()
        await self.memory_store.close()
        await asyncio.gather(*self.readers)

    def both(self, call: Callable[[PoolStore], Awaitable[Any]]) -> Any:
        """The answer of both, which must be the same, errors included."""

        async def answer(pool: PoolStore) -> Any:
            try:
                return await call(pool)
            except StoreError as error:
                return type(error)

        def ask(pool: PoolStore) -> Any:
            return self.loop.run_until_complete(answer(pool))

        memory, redis = ask(self.memory), ask(self.redis)
        assert plain(memory) == plain(redis)
        return memory

    # members -----------------------------------------------------------------------------------------------
    @initialize()
    def two_ready_instances_and_a_leader(self) -> None:
        self.acquire_lease("worker-1", 3_600_000)
        for spec in (instance("a", kv_capacity_tokens=900), instance("b", kv_capacity_tokens=900)):
            self.both(lambda pool, spec=spec: pool.put_instance(spec))
        for uncached in (300, 400, 500, 600, 100):
            self.reserve_new("a", "b", CHAINS[2], uncached, slo_ms=5000, features=None)

    def put_instance(
        self,
        instance_id: str,
        state: InstanceState,
        window: int,
        running: int,
        queued: int,
        kv_blocks: int,
        role: Role = Role.MIXED,
    ) -> None:
        spec = instance(
            instance_id,
            role=role,
            state=state,
            dispatch_window_tokens=window,
            max_running_requests=running,
            max_queued_requests=queued,
            kv_capacity_tokens=100 * kv_blocks,
        )
        self.both(lambda pool: pool.put_instance(spec))

    def set_state(self, instance_id: str, state: InstanceState, expected: InstanceState | None, fenced: bool) -> None:
        fence = self.fence if fenced else None
        self.both(lambda pool: pool.set_instance_state(instance_id, state, expected=expected, fence=fence))

    def update_instance(self, instance_id: str, changes: dict[str, Any], fenced: bool) -> None:
        fence = self.fence if fenced else None
        self.both(lambda pool: pool.update_instance(instance_id, changes, fence=fence))

    def becomes_ready(self, instance_id: str) -> None:
        self.both(lambda pool: pool.set_instance_state(instance_id, InstanceState.READY))

    def remove_instance(self, instance_id: str) -> None:
        self.both(lambda pool: pool.remove_instance(instance_id))

    # requests ----------------------------------------------------------------------------------------------
    def observe(self, request_chain: Chain) -> None:
        self.both(lambda pool: pool.observe(INSTANCES, request_chain))
        self.both(lambda pool: pool.observe(INSTANCES[:2], request_chain, horizon=True))

    @rule(
        request_id=requests,
        replica_id=replicas,
        instance_id=instances,
        alternative_id=st.none() | instances,
        request_chain=chains,
        uncached=uncached_tokens,
        attempt=attempts,
        seen=st.none() | st.integers(0, 1500),
        tolerance=st.integers(0, 500),
        overloaded=st.booleans(),
        slo_ms=slos_ms,
        features=ttft_features,
    )
    def reserve(
        self,
        request_id: str,
        replica_id: str,
        instance_id: str,
        alternative_id: str | None,
        request_chain: Chain,
        uncached: int,
        attempt: int,
        seen: int | None,
        tolerance: int,
        overloaded: bool,
        slo_ms: int,
        features: TtftFeatures | None,
    ) -> None:
        made = reservation(
            request_id,
            instance_id,
            replica_id=replica_id,
            chain=request_chain,
            uncached_tokens=uncached,
            alternative_id=alternative_id,
            alternative_uncached_tokens=uncached // 2,
            attempt=attempt,
            seen_pending_tokens=seen,
            tolerance_tokens=tolerance,
            overloaded=overloaded,
            slo_ms=slo_ms,
            ttft_features=features,
        )
        self.both(lambda pool: pool.reserve(made))

    @rule(
        instance_id=ready_instances,
        alternative_id=ready_instances,
        request_chain=chains,
        uncached=uncached_tokens,
        slo_ms=slos_ms,
        features=ttft_features,
    )
    def reserve_new(
        self,
        instance_id: str,
        alternative_id: str,
        request_chain: Chain,
        uncached: int,
        slo_ms: int,
        features: TtftFeatures | None,
    ) -> None:
        unused = [name for name in REQUESTS if name not in self.memory.ledger.requests]
        if unused:
            made = reservation(
                unused[0],
                instance_id,
                chain=request_chain,
                uncached_tokens=uncached,
                alternative_id=alternative_id,
                alternative_uncached_tokens=uncached + 7,
                slo_ms=slo_ms,
                ttft_features=features,
            )
            self.both(lambda pool: pool.reserve(made))

    @rule(
        candidates=pairs,
        request_id=requests,
        replica_id=replicas,
        request_chain=chains,
        slo_ms=slos_ms,
        quiet=st.booleans(),
    )
    def reserve_idle(
        self,
        candidates: tuple[str, ...],
        request_id: str,
        replica_id: str,
        request_chain: Chain,
        slo_ms: int,
        quiet: bool,
    ) -> None:
        if idle_holder_cost(self.scheduling) is None:
            return
        if quiet:  # else hardly anybody would ever be idle
            for each in [*self.memory.ledger.requests.values()]:
                if each.instance_id in candidates:
                    self.finish_of_anything(each.request_id, None, None)
        self.newcomer(candidates, request_id, replica_id, request_chain, slo_ms)

    def newcomer(
        self, candidates: tuple[str, ...], request_id: str, replica_id: str, request_chain: Chain, slo_ms: int
    ) -> Decision | None:
        """What was reserved at once, which must be what the policy says."""
        newcomer = Newcomer(request_id, replica_id, request_chain, expected_output_tokens=50, slo_ms=slo_ms)
        seen, placement = self.both(lambda pool: pool.reserve_idle(candidates, newcomer))
        if placement is None:
            return None
        query = RouteQuery(request_chain, slo_ms / 1000, pair=candidates)
        assert build_policy(self.scheduling).choose_or_look(query, seen.loads, seen.horizon) == placement.decision
        return placement.decision

    def pick(self, number: int, *wanted: RequestState) -> LiveRequest | None:
        """One of the live requests in the wanted states: rules that would mostly miss would prove little."""
        live = [request for request in self.memory.ledger.requests.values() if request.state in wanted]
        return live[number % len(live)] if live else None

    @rule(number=picks, request_chain=chains, seen=st.sampled_from((True, True, False)))
    def first_token(self, number: int, request_chain: Chain, seen: bool) -> None:
        request = self.pick(number, RequestState.DISPATCHED)
        if request is not None:
            request_id, instance_id = request.request_id, request.instance_id
            self.both(lambda pool: pool.first_token(request_id, instance_id, request_chain, seen=seen))

    def first_token_of_anything(self, request_id: str, instance_id: str, request_chain: Chain) -> None:
        self.both(lambda pool: pool.first_token(request_id, instance_id, request_chain))

    @rule(number=picks, facts=finish_facts)
    def finish(self, number: int, facts: FinishFacts | None) -> None:
        request = self.pick(number, *RequestState)
        if request is not None:
            request_id, replica_id = request.request_id, request.replica_id
            self.both(lambda pool: pool.finish(request_id, replica_id=replica_id, facts=facts))

    def finish_of_anything(self, request_id: str, replica_id: str | None, attempt: int | None) -> None:
        self.both(lambda pool: pool.finish(request_id, replica_id=replica_id, attempt=attempt))

    @rule(number=picks, destination=instances)
    def migrate(self, number: int, destination: str) -> None:
        request = self.pick(number, RequestState.HELD)
        if request is not None:
            source = request.instance_id
            self.both(
                lambda pool: pool.migrate(request.request_id, source, destination, reason="benefit", fence=self.fence)
            )

    def migrate_anything(self, request_id: str, source: str, destination: str, stale_fence: bool) -> None:
        fence = self.fence - stale_fence
        self.both(lambda pool: pool.migrate(request_id, source, destination, reason="stalled", fence=fence))

    @rule(number=picks, instance_id=instances, uncached=uncached_tokens, margin=st.none() | st.integers(-300, 300))
    def retry(self, number: int, instance_id: str, uncached: int, margin: int | None) -> None:
        """A higher attempt, its seen load near the true one."""
        former = self.pick(number, *RequestState)
        if former is None:
            return
        account = self.memory.ledger.accounts.get(instance_id)
        seen = None if margin is None or account is None else max(0, account.pending_tokens + margin)
        made = reservation(
            former.request_id,
            instance_id,
            replica_id=former.replica_id,
            uncached_tokens=uncached,
            attempt=former.attempt + 1,
            seen_pending_tokens=seen,
        )
        self.both(lambda pool: pool.reserve(made))

    def adopt(self, request_id: str, instance_id: str, replica_id: str, state: RequestState, sequence: int) -> None:
        at_ms = self.clock.now_ms - 50
        record = RequestRecord(
            request_id,
            replica_id,
            instance_id,
            state,
            attempt=1,
            uncached_tokens=300,
            prompt_tokens=350,
            expected_output_tokens=20,
            slo_ms=5000,
            enqueued_ms=at_ms,
            dispatched_ms=0 if state is RequestState.HELD else at_ms,
            prefilled_ms=at_ms if state is RequestState.PREFILLED else 0,
            alternative_id=None,
            alternative_uncached_tokens=0,
            sequence=sequence,
        )
        self.both(lambda pool: pool.adopt([record]))

    # time, leases, upkeep ----------------------------------------------------------------------------------
    @rule(by_ms=st.integers(1, 8000))
    def time_passes(self, by_ms: int) -> None:
        self.clock.advance(by_ms)

    @rule(by_ms=st.integers(1, 8000))
    def clock_is_set_back(self, by_ms: int) -> None:
        self.clock.advance(-by_ms)

    @rule()
    def grant_overdue(self) -> None:
        self.both(lambda pool: pool.grant_overdue(fence=self.fence))

    def heartbeat(self, replica_id: str, lease_ms: int) -> None:
        self.both(lambda pool: pool.heartbeat(replica_id, lease_ms, {"pid": "7"}))

    def retire(self, replica_id: str) -> None:
        self.both(lambda pool: pool.retire(replica_id))

    def acquire_lease(self, owner: str, lease_ms: int) -> None:
        lease = self.both(lambda pool: pool.acquire_lease(owner, lease_ms))
        if lease is not None:
            self.fence, self.lease = lease.fence, lease

    def renew_or_release_lease(self, lease_ms: int, release: bool) -> None:
        if release:
            self.both(lambda pool: pool.release_lease(self.lease))
        else:
            self.both(lambda pool: pool.renew_lease(self.lease, lease_ms))

    def publish_tree(self, hot: dict[int, int], count: int) -> None:
        counts = dict.fromkeys(hot, count)
        self.both(lambda pool: pool.publish_tree(HotnessTree(hot), counts, fence=self.fence))

    def reap(self, replica_id: str) -> None:
        self.both(lambda pool: pool.reap(replica_id, fence=self.fence))

    def drift_and_repair(self, instance_id: str, sum_name: str, drift: int) -> None:
        account = self.memory.ledger.accounts.get(instance_id)
        if account is None:
            return
        self.drift(account, sum_name, drift)
        repaired = self.both(lambda pool: pool.repair(fence=self.fence))
        if isinstance(repaired, type):  # fenced: undo what nobody may repair
            self.drift(account, sum_name, -drift)

    def drift(self, account: InstanceAccount, sum_name: str, by: int) -> None:
        setattr(account, sum_name, getattr(account, sum_name) + by)
        self.client.hincrby(self.keys.account(account.spec.instance_id).account, sum_name, by)

    def read_what_workers_read(self) -> None:
        self.both(lambda pool: pool.wanted_rebalances(0))
        self.both(lambda pool: pool.membership())
        self.both(lambda pool: pool.loads())
        self.both(lambda pool: pool.expired_replicas())

    # seldom ones share a rule, so that most steps are steps of requests ----------------------------------------
    @rule(data=st.data())
    def members_change(self, data: st.DataObject) -> None:
        instance_id = data.draw(instances)
        match data.draw(st.integers(0, 6)):
            case 6:
                self.update_instance(instance_id, data.draw(changes_of_instances), data.draw(st.booleans()))
            case 0:
                self.put_instance(
                    instance_id,
                    data.draw(states),
                    data.draw(st.sampled_from((1, 500, 2000))),
                    data.draw(st.integers(1, 3)),
                    data.draw(st.integers(0, 3)),
                    data.draw(st.integers(0, 9)),
                    data.draw(roles),
                )
            case 1:
                self.set_state(instance_id, data.draw(states), data.draw(st.none() | states), data.draw(st.booleans()))
            case 2:
                self.remove_instance(instance_id)
            case _:
                self.becomes_ready(data.draw(ready_instances))

    @rule(data=st.data())
    def call_strays(self, data: st.DataObject) -> None:
        request_id, instance_id = data.draw(requests), data.draw(instances)
        match data.draw(st.integers(0, 4)):
            case 0:
                self.first_token_of_anything(request_id, instance_id, data.draw(chains))
            case 1:
                self.finish_of_anything(request_id, data.draw(st.none() | replicas), data.draw(st.none() | attempts))
            case 2:
                self.migrate_anything(request_id, instance_id, data.draw(instances), data.draw(st.booleans()))
            case 3:
                replica_id, state = data.draw(replicas), data.draw(st.sampled_from(RequestState))
                self.adopt(request_id, instance_id, replica_id, state, data.draw(st.integers(1, 40)))
            case _:
                self.observe(data.draw(chains))

    @rule(data=st.data())
    def workers_work(self, data: st.DataObject) -> None:
        lease_ms = data.draw(st.integers(1, 60_000))
        match data.draw(st.integers(0, 8)):
            case 0:
                self.heartbeat(data.draw(replicas), lease_ms)
            case 1:
                self.retire(data.draw(replicas))
            case 2:
                self.renew_or_release_lease(lease_ms, data.draw(st.booleans()))
            case 3:
                hot = data.draw(st.dictionaries(st.integers(0, 2**64 - 1), st.integers(1, 4), max_size=4))
                self.publish_tree(hot, data.draw(st.integers(0, 9)))
            case 4:
                self.reap(data.draw(replicas))
            case 5:
                sum_name = data.draw(st.sampled_from(("pending_tokens", "late_tokens")))
                self.drift_and_repair(data.draw(instances), sum_name, data.draw(st.integers(-500, 500)))
            case 6:
                self.read_what_workers_read()
            case _:
                self.acquire_lease(data.draw(st.sampled_from(("worker-1", "worker-2"))), lease_ms)

    # what must hold after every step -----------------------------------------------------------------------
    @invariant()
    def views_agree(self) -> None:
        self.both(lambda pool: pool.snapshot())
        for instance_id in INSTANCES:
            self.both(lambda pool, instance_id=instance_id: pool.queue(instance_id))

    @invariant()
    def kv_metadata_and_arrivals_agree(self) -> None:
        for instance_id, account in self.memory.ledger.accounts.items():
            stamps = self.client.zrange(self.keys.account(instance_id).kv, 0, -1, withscores=True)
            hashes = [unpack_chain(member)[0] for member, _ in stamps]
            assert hashes == account.kv.oldest_first()
            given = [block_hash for block_hash in hashes if account.kv.given_blocks((block_hash,))]
            assert [
                block_hash for block_hash, (_, stamp) in zip(hashes, stamps, strict=True) if stamp % 1 == 0
            ] == given
        arrivals = [
            [(arrival.at_ms, arrival.head) for arrival in self.loop.run_until_complete(pool.arrivals("0", 1000))]
            for pool in (self.memory, self.redis)
        ]
        assert arrivals[0] == arrivals[1][-len(arrivals[0]) :]

    @invariant()
    def chains_of_held_requests_are_kept_and_no_others(self) -> None:
        kept = {name.decode(): unpack_chain(packed) for name, packed in self.client.hgetall(self.keys.chains).items()}
        requests = self.memory.ledger.requests.values()
        assert kept == {request.request_id: request.chain.hashes for request in requests if request.chain is not None}
        assert all(self.memory.ledger.requests[name].state is RequestState.HELD for name in kept)

    @invariant()
    def grants_agree(self) -> None:
        async def all_read() -> None:
            async with asyncio.timeout(5):
                await asyncio.sleep(0)
                while len(self.grants["redis"]) < len(self.grants["memory"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        self.loop.run_until_complete(all_read())
        in_order = {name: sorted(map(repr, grants)) for name, grants in self.grants.items()}
        assert in_order["memory"] == in_order["redis"]

    @invariant()
    def sums_are_the_sums_of_the_requests(self) -> None:
        for account in self.memory.ledger.accounts.values():
            kept = account.pending_tokens, account.dispatched_tokens, account.late_tokens, account.context_tokens
            assert account.sums() == kept
            assert not (len(account.queue) and account.has_room()), "room is never left unused"
            spare = account.has_room() and has_room_to_spare(account.dispatched_tokens, account.kv_demand)
            assert not (len(account.late) and spare), "an instance with room to spare takes whoever is late"

    @invariant()
    def overdue_work_agrees(self) -> None:
        for instance_id, account in self.memory.ledger.accounts.items():
            key = self.keys.account(instance_id).account
            work_ms, at_ms = self.client.hmget(key, "overdue_work_ms", "overdue_at_ms")
            assert (float(work_ms), int(at_ms)) == (account.overdue.work_ms, account.overdue.at_ms)

    @invariant()
    def queues_and_horizon_agree(self) -> None:
        ledger, client = self.memory.ledger, self.client
        for instance_id, account in ledger.accounts.items():
            keys = self.keys.account(instance_id)
            for key, queue in ((keys.queue, account.queue), (keys.late, account.late)):
                listed = [member.decode() for member in client.zrange(key, 0, -1)]
                assert listed == [request.request_id for request in queue]
        lightest = client.zrange(self.keys.lightest, 0, -1, withscores=True)
        assert {member.decode(): score for member, score in lightest} == plain(ledger.lightest.all())
        for key, generation in zip(self.keys.holders, ledger.holders.generations(), strict=True):
            kept = {unpack_chain(mark)[0]: ids.decode().split() for mark, ids in client.hgetall(key).items()}
            assert kept == plain(generation)


def plain(answer: Any) -> Any:
    """An answer as comparable parts: floats to nine digits, log positions left out."""
    if isinstance(answer, Mapping):
        return {key: plain(value) for key, value in answer.items()}
    if isinstance(answer, (list, tuple)):
        return [plain(value) for value in answer]
    if isinstance(answer, float):
        return pytest.approx(answer, rel=1e-9, abs=1e-9)
    if hasattr(answer, "__dataclass_fields__"):
        return plain({name: getattr(answer, name) for name in answer.__dataclass_fields__})
    return answer


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheduling", [SCHEDULING, DEADLINE], ids=["fifo", "deadline"])
def test_memory_and_valkey_agree_on_every_sequence_of_calls(
    valkey_server: EmbeddedValkey, scheduling: SchedulingSettings
) -> None:
    machine = type("TwinsOnThisServer", (Twins,), {"server": valkey_server, "scheduling": scheduling})
    if SEED is not None:
        machine = seed(int(SEED))(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),  # every step talks to a server: shrinking would take minutes
        ),
    )
