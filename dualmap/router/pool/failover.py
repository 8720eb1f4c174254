"""One pool that outlives its store: shared while Redis answers, local while it does not.

A store that cannot be reached is away, and so is one that refuses calls: for a request it makes no difference why it
cannot be entered. While the store is away the replica decides on a local state, seeded with the last known members and
its own live requests. It does not see other replicas' load then, but the dual mapping still keeps prefixes together.
When the store is back, the replica hands its requests over and shares the state again.

There is no await between reading and changing local state. A hand-over waits for the calls under way, and other calls
wait for its end, so nothing changes during it; every wait is bounded by the store's own timeouts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Generic, TypeVar

from dualmap.router.pool.recovery import (
    MOST_ENDS,
    UnsettledEnds,
    lost_members,
    recover_requests,
    restore_members,
)
from dualmap.router.telemetry.metrics import StoreCall, measured
from dualmap.runtime.clock import Clock, RealClock
from dualmap.scheduling.backoff import backoff_s, worth_logging
from dualmap.scheduling.placing.placement import Observation, Placement, PlaceReply, PlaceStatus
from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import CommitReply, Grant
from dualmap.scheduling.queues.leader_jobs import sweep_queue
from dualmap.scheduling.queues.queue_order import QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import Turn
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.legs import request_id_of
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.steps import at_once, drive
from dualmap.scheduling.tenants.budgets import Budget, Drawn, Draws
from dualmap.statestore.call_values import Membership, PoolOverview, PoolSnapshot, Transition
from dualmap.statestore.errors import LimitsUnknownError, StoreError, StoreUnavailableError
from dualmap.statestore.memory import MemoryStore, wall_clock_ms
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.allotments import Allotment
from dualmap.statestore.pool.runs import TurnStatus
from dualmap.statestore.port import ReplicaPool, RequestPort

FIRST_PROBE_S = 0.05
LONGEST_PROBE_S = 1.0
STEADY_S = 5.0
"""A store that is away again sooner than this after a hand-over was not really back: its backoff continues."""
HAND_OVER_TIMEOUT_S = 10.0
REMEMBERED_PARTS = 1_000
"""Budgets divided among pools whose parts a replica remembers; of others it uses equal parts without the store."""

_log = logging.getLogger(__name__)
Asked = TypeVar("Asked")
Reply = TypeVar("Reply")


@dataclass(slots=True)
class _Calls:
    """Calls of the shared store under way, which a hand-over waits for, and the hand-over that others wait for."""

    under_way: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event | None = None

    def ended(self) -> None:
        """A call ended while a hand-over waits."""
        if not self.under_way:
            self.quiet.set()

    async def until_quiet(self) -> None:
        while self.under_way:
            self.quiet.clear()
            await self.quiet.wait()


@dataclass(frozen=True, slots=True)
class _Call(Generic[Asked, Reply]):
    """One kind of call that the shared store answers, or the local one in its place."""

    measure: StoreCall
    ask: Callable[[RequestPort, Asked], Awaitable[Reply]]
    trusts: Callable[[Asked, Reply], bool]
    """Whether the answer is of a shared store that has its members."""
    alone: Callable[[PoolStore, Asked, bool], Awaitable[Reply]]
    """Asks the local one; the last argument is whether the shared one was tried before."""
    took: Callable[[float], None] = field(init=False)
    """Observes the time that it took."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "took", self.measure.latency_s.observe)

    @classmethod
    def plain(cls, measure: StoreCall, ask: Callable[[RequestPort, Asked], Awaitable[Reply]]) -> _Call[Asked, Reply]:
        """A call whose answer shows nothing but itself."""
        return cls(measure, ask, _trusts, lambda local, asked, tried: ask(local, asked))


def _trusts(_: object, __: object) -> bool:
    return True


def _never(_: str) -> bool:
    return False


def _unnoted(_: object) -> None: ...


def _ask_to_commit(pool: RequestPort, asked: tuple[QueuePlan, str]) -> Awaitable[CommitReply]:
    return pool.commit(asked[0], replica_id=asked[1])


def _ask_for_records(pool: RequestPort, request_ids: Sequence[str]) -> Awaitable[Mapping[str, StoredRequest]]:
    return pool.records(request_ids)


def _ask_for_requests(pool: RequestPort, replica_id: str) -> Awaitable[Sequence[StoredRequest]]:
    return pool.requests_of(replica_id)


def _ask_to_adopt(pool: RequestPort, requests: Sequence[StoredRequest]) -> Awaitable[int]:
    return pool.adopt(requests)


class FailoverPool:
    """``ReplicaPool`` that goes on without the store: all that a replica calls of its pool, measured.

    Calls of requests never raise StoreError once members are known; heartbeats, snapshots and what operators call do:
    the state of one replica is not the fleet's."""

    def __init__(
        self,
        primary: ReplicaPool,
        scheduling: SchedulingSettings,
        *,
        measures: Mapping[str, StoreCall],
        clock: Clock | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
        needs_limits: bool = False,
    ) -> None:
        """``measures`` are those of ``STORE_CALLS``. With ``needs_limits`` what draws from limits is placed by the
        shared store alone."""
        self._primary = primary
        self._measures = measures
        self.noted: Callable[[Observation], None] = _unnoted
        """Called with every reply that shows instances, of whichever store."""
        plain = _Call.plain
        self._placing = _Call(measures["place"], self._ask_to_place, self._trusts_placed, self._place_alone)
        self._observing = _Call(
            measures["observe"],
            lambda pool, asked: pool.observe(*asked),
            self._trusts_seen,
            self._observe_alone,
        )
        self._releasing = _Call(
            measures["release"], lambda pool, releases: pool.release(releases), self._takes, self._release_alone
        )
        self._reading: _Call[None, Membership] = _Call(
            measures["membership"],
            lambda pool, _: pool.membership(),
            self._trusts_members,
            lambda local, _, tried: local.membership(),
        )
        self._admitting: _Call[tuple[Sequence[Turn], int], Sequence[TurnStatus]] = _Call(
            measures["admit"], lambda pool, asked: pool.admit(*asked), _trusts, self._admit_alone
        )
        self._registering = plain(measures["register"], self._ask_to_register)
        self._committing = plain(measures["commit"], _ask_to_commit)
        self._looking_up = plain(measures["records"], _ask_for_records)
        self._listing = plain(measures["requests_of"], _ask_for_requests)
        self._adopting = plain(measures["adopt"], _ask_to_adopt)
        self.name = primary.name
        # These go to the shared store, and fail with it.
        self.schema = primary.schema
        self.members = primary.members
        self.adapters = primary.adapters
        self.revisions = primary.revisions
        self.settings = primary.settings
        self.queues = primary.queues
        self.publications = primary.publications
        self.chronicle = primary.chronicle
        self.usage = primary.usage
        self.responses = primary.responses
        self.runs = primary.runs
        self.on_turn = primary.on_turn
        self.loads = primary.loads
        self.loads_of = primary.loads_of
        self._live: Callable[[int], Sequence[StoredRequest]] = lambda now_ms: ()
        self._rates: Callable[[], Mapping[str, float]] = dict
        self._is_ending: Callable[[str], bool] = _never
        self._scheduling = scheduling
        self._clock = clock if clock is not None else RealClock()
        self._now_ms = now_ms
        self._needs_limits = needs_limits
        self._listeners: list[tuple[str, Callable[[Grant], None]]] = []
        self._known: Membership | None = None
        self._local: PoolStore | None = None
        self._beat: tuple[str, int, Mapping[str, str]] | None = None
        """The last heartbeat: repeated at a hand-over, before a reaper takes this replica for dead."""
        self._calls = _Calls()
        self._parts: dict[str, tuple[int, Budget]] = {}
        """The last known parts of this pool in budgets that are divided among pools, and these; the one seen last
        is behind the others."""
        self._early_grants: list[Callable[[], None]] = []
        self._returning: asyncio.Task[None] | None = None
        self._probes = 0
        """Probes in a row, without a store that was steady in between."""
        self._back_s = float("-inf")
        """When the last hand-over succeeded."""
        self._ends = UnsettledEnds(self._clock.monotonic_s)
        self._seeds: frozenset[str] = frozenset()
        """The requests that the local state began with: the store may know them, and no others that are there."""

    @property
    def degraded(self) -> bool:
        return self._local is not None

    def recover_from(
        self,
        live: Callable[[int], Sequence[StoredRequest]],
        rates: Callable[[], Mapping[str, float]],
        is_ending: Callable[[str], bool] = _never,
    ) -> None:
        self._live, self._rates, self._is_ending = live, rates, is_ending

    async def close(self) -> None:
        """Stop probing."""
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.gather(self._returning, return_exceptions=True)

    # calls of requests -----------------------------------------------------------------------------------
    def membership(self) -> Awaitable[Membership]:
        return self._either(self._reading, None)

    def place(self, placement: Placement) -> Awaitable[PlaceReply]:
        return self._either(self._placing, placement)

    def register(self, request: StoredRequest, draws: Draws | None) -> Awaitable[tuple[PlaceStatus, Drawn]]:
        return self._either(self._registering, (request, draws))

    def admit(self, turns: Sequence[Turn], capacity_tokens: int) -> Awaitable[Sequence[TurnStatus]]:
        """Every turn goes while this replica decides alone: it does not know what runs the memory holds."""
        return self._either(self._admitting, (turns, capacity_tokens))

    def observe(self, instance_ids: Sequence[str], chain: Chain) -> Awaitable[Observation]:
        return self._either(self._observing, (instance_ids, chain))

    def commit(self, plan: QueuePlan, *, replica_id: str = "") -> Awaitable[CommitReply]:
        return self._either(self._committing, (plan, replica_id))

    def release(self, releases: Sequence[Release]) -> Awaitable[Sequence[Transition]]:
        """Ends that a local state takes are kept, and told to the store when it is back."""
        return self._either(self._releasing, releases)

    def records(self, request_ids: Sequence[str]) -> Awaitable[Mapping[str, StoredRequest]]:
        return self._either(self._looking_up, request_ids)

    def requests_of(self, replica_id: str) -> Awaitable[Sequence[StoredRequest]]:
        return self._either(self._listing, replica_id)

    def adopt(self, requests: Sequence[StoredRequest]) -> Awaitable[int]:
        return self._either(self._adopting, requests)

    async def _either(self, call: _Call[Asked, Reply], asked: Asked) -> Reply:
        """The answer of the shared store, else of the local one. A call that another one overtook, as that found the
        store away meanwhile, is made locally as well: the local state has to know of it. An answer that is not trusted
        shows that the store lost its members; what it reserved all the same is over there at the hand-over."""
        calls, tried, started_s = self._calls, False, perf_counter()
        try:
            # A hand-over moves the requests from one state to the other: only its end shows which one this call belongs
            # to.
            local = self._local if calls.settled is None else await self._local_pool()
            if local is None:
                # No await since the choice above: a hand-over that starts now must know of this call, and wait for it.
                calls.under_way, tried = calls.under_way + 1, True
                try:
                    answer = await call.ask(self._primary, asked)
                except StoreError as error:
                    local = self._degrade(error)
                else:
                    if self._local is None and call.trusts(asked, answer):
                        return answer
                    local = self._degrade(StoreUnavailableError("the store lost its members"))
                finally:
                    calls.under_way -= 1
                    if calls.settled is not None:
                        calls.ended()
            return await call.alone(local, asked, tried)
        except StoreError:
            call.measure.errors.inc()
            raise
        finally:
            call.took(perf_counter() - started_s)

    # what the calls of requests are made of --------------------------------------------------------------
    def _ask_to_place(self, pool: RequestPort, placement: Placement) -> Awaitable[PlaceReply]:
        if self._needs_limits and placement.draws is not None and not placement.must_draw:
            pool = self._by_limits(pool)
        return pool.place(placement)

    def _ask_to_register(
        self, pool: RequestPort, asked: tuple[StoredRequest, Draws | None]
    ) -> Awaitable[tuple[PlaceStatus, Drawn]]:
        if self._needs_limits and asked[1] is not None:
            pool = self._by_limits(pool)
        return pool.register(*asked)

    def _by_limits(self, pool: RequestPort) -> RequestPort:
        """The pool, if it has the books of all replicas. Raises LimitsUnknownError where this replica decides alone."""
        if pool is not self._primary:
            raise LimitsUnknownError("the store is away")
        return pool

    async def _admit_alone(self, _: PoolStore, asked: tuple[Sequence[Turn], int], tried: bool) -> Sequence[TurnStatus]:
        return [TurnStatus.GOES] * len(asked[0])

    async def _place_alone(self, local: PoolStore, placement: Placement, _: bool) -> PlaceReply:
        if placement.turn is not None:
            placement = replace(placement, turn=None)  # this replica does not know what runs the memory holds
        reply = await self._ask_to_place(local, placement)
        self.noted(reply.seen)
        return reply

    async def _observe_alone(self, local: PoolStore, asked: tuple[Sequence[str], Chain], _: bool) -> Observation:
        seen = await local.observe(*asked)
        self.noted(seen)
        return seen

    async def _release_alone(self, local: PoolStore, releases: Sequence[Release], tried: bool) -> Sequence[Transition]:
        """Keep the ends that a local state takes. The store may have taken them too where it was tried."""
        records = {} if tried else await local.records([each.request_id for each in releases])
        self._ends.keep(releases, records, self._seeds)
        return await local.release(releases)

    def _takes(self, releases: Sequence[Release], _: object) -> bool:
        """Remember what the store took, as it may lose that."""
        self._ends.taken(releases)
        return True

    def _trusts_members(self, _: None, found: Membership) -> bool:
        if self._known is not None and lost_members(found, self._known):
            return False
        self._known = found
        return True

    def _trusts_placed(self, placement: Placement, reply: PlaceReply) -> bool:
        """Whether the reply is of a store that has its members; remembers the parts of this pool in budgets that are
        divided."""
        if self._known is not None and reply.seen.epoch < self._known.epoch:
            return False
        self.noted(reply.seen)
        draws, drawn = placement.draws, reply.drawn_reply
        if draws is not None and draws.group.is_divided and drawn is not None:
            for place, part in drawn.read().parts.items():
                budget = draws.group.budgets[place]
                self._parts.pop(budget.name, None)
                self._parts[budget.name] = part, budget
            while len(self._parts) > REMEMBERED_PARTS:
                del self._parts[next(iter(self._parts))]
        return True

    def _trusts_seen(self, _: object, seen: Observation) -> bool:
        if self._known is not None and seen.epoch < self._known.epoch:
            return False
        self.noted(seen)
        return True

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        self._beat = (replica_id, lease_ms, info)
        return await self._of_the_fleet("heartbeat", lambda: self._primary.heartbeat(replica_id, lease_ms, info))

    async def retire(self, replica_id: str) -> None:
        self._beat = None
        await self._primary.retire(replica_id)

    # what is read of the fleet ---------------------------------------------------------------------------
    async def overview(self) -> PoolOverview:
        return await self._of_the_fleet("overview", self._primary.overview)

    async def snapshot(self) -> PoolSnapshot:
        return await self._of_the_fleet("snapshot", self._primary.snapshot)

    async def _of_the_fleet(self, kind: str, call: Callable[[], Awaitable[Reply]]) -> Reply:
        """A call of the shared store that a local state cannot answer. Raises StoreUnavailableError, at once while this
        replica decides alone."""
        return await measured(self._measures[kind], self._of_the_store(call))

    async def _of_the_store(self, call: Callable[[], Awaitable[Reply]]) -> Reply:
        if await self._local_pool() is not None:
            raise StoreUnavailableError(f"pool {self.name}: the store is away, this replica decides alone")
        try:
            return await call()
        except StoreError as error:
            self._degrade(error)
            raise

    # grants ----------------------------------------------------------------------------------------------
    def on_grant(self, replica_id: str, deliver: Callable[[Grant], None]) -> None:
        """Deliver grants of a replica. While this replica decides alone, its local state's grants count instead of the
        shared store's."""
        self._listeners.append((replica_id, deliver))
        if self._local is not None:
            self._local.on_grant(replica_id, deliver)

        def granted(grant: Grant) -> None:
            if self._calls.settled is not None:
                self._early_grants.append(partial(granted, grant))
            elif self._local is None:
                deliver(grant)

        self._primary.on_grant(replica_id, granted)

    # away and back ---------------------------------------------------------------------------------------
    async def _local_pool(self) -> PoolStore | None:
        """The state to use instead of the store, if any; waits for a hand-over to end."""
        while self._calls.settled is not None:
            await self._calls.settled.wait()
        return self._local

    def _degrade(self, error: StoreError) -> PoolStore:
        """Start deciding alone. Raises ``error`` if there is nothing known to decide on."""
        if self._local is not None:
            return self._local
        if self._known is None:
            raise error
        _log.warning("pool %s: on its own, without the store: %s", self.name, error)
        self._local = self._local_state(self._known)
        for listener in self._listeners:
            self._local.on_grant(*listener)
        self._returning = asyncio.get_running_loop().create_task(self._return())
        return self._local

    def _local_state(self, known: Membership) -> PoolStore:
        """The last known members, rates and parts of budgets, and only this replica's live requests."""
        store = MemoryStore(self._scheduling, now_ms=self._now_ms)
        local = store.pool_of(self.name, known, self._rates())
        for name, (part, budget) in self._parts.items():
            assert budget.division is not None
            begins_with = budget.division.first_part(budget.capacity)
            at_once(local.allotments.allot(Allotment(name, budget.capacity, begins_with, 1, part)))
        live = self._live(self._now_ms())
        self._seeds = frozenset([each.request_id for each in live])
        at_once(local.adopt(live))
        return local

    async def _return(self) -> None:
        """Probe the store until a hand-over succeeds; meanwhile no worker sweeps the queues, so do it here."""
        if self._clock.monotonic_s() - self._back_s >= STEADY_S:
            self._probes = 0
        while self._local is not None:
            self._probes += 1
            await self._clock.sleep(backoff_s(self._probes, first_s=FIRST_PROBE_S, longest_s=LONGEST_PROBE_S))
            await self._sweep(self._local)
            try:
                found = await self._primary.membership()
                async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
                    await self._hand_over(found)
            except (StoreError, TimeoutError) as error:
                if worth_logging(self._probes):
                    _log.info("pool %s: the store is still away, probes=%d: %s", self.name, self._probes, error)
            except Exception:
                _log.exception("pool %s: the hand-over to the store failed, trying again", self.name)
        # The parts of the local state refer to each other, also through Lua, so that only the collector frees them; it
        # would come after some thousand requests, and each time that the store is away another state would wait for it.
        gc.collect()

    async def _sweep(self, local: PoolStore) -> None:
        assert self._known is not None
        order = queue_order_of(self.settings.in_force(self._known.overrides))
        for instance_id in (await local.membership()).instances:
            await drive(sweep_queue(instance_id, order), local)

    async def _hand_over(self, found: Membership) -> None:
        """Members where the store lost them (what was removed there on purpose stays removed), then live requests."""
        known = self._known
        assert self._local is not None and known is not None
        # It is set before the wait: new calls wait for the hand-over, so those under way can only become fewer.
        settled = self._calls.settled = asyncio.Event()
        try:
            await self._calls.until_quiet()
            if lost_members(found, known):
                await restore_members(self._primary, known.instances.values(), known)
            live: Sequence[StoredRequest] = ()
            if self._beat is not None:
                await self._primary.heartbeat(*self._beat)
                now_ms = (await self._primary.snapshot()).now_ms
                stored = await self._primary.requests_of(self._beat[0])
                # The live requests are read after the store's list: one that is placed in between must not be taken for
                # one that is over.
                live = self._live(now_ms)
                # Those whose release waits for the end of the hand-over stand as they were: it comes by itself.
                ending = [each for each in await self._local.requests_of(self._beat[0]) if self._ends_soon(each)]
                stored = [each for each in stored if not self._ends_soon(each)]
                await recover_requests(self._primary, stored, [*live, *ending], self._ends.all())
            self._known = await self._primary.membership()
            self._local = None
            self._back_s = self._clock.monotonic_s()
            _log.warning("pool %s: the store is back; %d live requests were handed over", self.name, len(live))
            if self._ends.dropped:
                _log.warning(
                    "pool %s: %d requests of tenants that began and ended without the store are in no books: more than"
                    " are kept (%d)",
                    self.name,
                    self._ends.dropped,
                    MOST_ENDS,
                )
            self._ends.settled()
        finally:
            self._calls.settled = None
            # Grants are delivered after the switch: during the hand-over one could be of either state.
            early, self._early_grants = self._early_grants, []
            for granted in early:
                granted()
            settled.set()

    def _ends_soon(self, record: StoredRequest) -> bool:
        """Whether the release that ends it is under way."""
        return self._is_ending(request_id_of(record.request_id))
