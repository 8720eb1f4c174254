"""The store contract: what every implementation promises, whatever keeps the state.

A store holds one pool's shared truth: members, loads, queues, KV metadata, hotness, leases. Unless it says otherwise, a
method is atomic: its effect is seen whole or not at all, by every replica in the same order. Every transition of a
request is idempotent: a repetition after a lost answer changes nothing and reports the state as it is.

Times are milliseconds of the store's own clock (Redis ``TIME``); no caller's clock enters. A request's life:

    reserve ── room ──▶ dispatched ── first_token ──▶ prefilled ── finish ──▶ gone
       └── no room ──▶ held ── grant ──▶ dispatched
                        └── migrate ──▶ held at the other candidate (or dispatched there at once)

``finish`` is legal in every state and releases whatever is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from scheduling.chain import Chain
from scheduling.decision import Horizon
from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.values import value
from statestore.leases import Lease, ReplicaInfo
from statestore.reservation import IdlePlacement, Newcomer, Reservation, ReserveOutcome
from statestore.stream import Stream


class RequestState(StrEnum):
    HELD = "held"
    DISPATCHED = "dispatched"
    PREFILLED = "prefilled"


@value
class Grant:
    """A held request was dispatched: its replica must send it to ``instance_id`` now."""

    request_id: str
    instance_id: str
    attempt: int
    uncached_tokens: int
    """To prefill there, as counted when it was dispatched."""


@value
class Observation:
    """What a decision needs, from one round trip."""

    epoch: int
    tree_version: int
    sequence: int
    """Grows by one with every observation in the pool, over all replicas."""
    loads: Mapping[str, InstanceLoad]
    """By id, in the order asked; unknown instances are missing."""
    horizon: Horizon | None = None
    """What is known beyond the instances asked for, if it was asked for."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The part of the state that replicas keep a copy of."""

    epoch: int
    tree_version: int
    instances: Mapping[str, InstanceSpec]
    tree: HotnessTree
    bytes_per_token: float
    """Learned over all replicas from prompts whose token count an instance reported."""


@value
class RequestRecord:
    """One live request as the store knows it. Times in ms of the store's clock; 0 means not yet."""

    request_id: str
    replica_id: str
    instance_id: str
    state: RequestState
    attempt: int
    uncached_tokens: int
    prompt_tokens: int
    expected_output_tokens: int
    slo_ms: int
    enqueued_ms: int
    """First reservation; a retry or a migration keeps it, so deadlines do not slide."""
    dispatched_ms: int
    prefilled_ms: int
    alternative_id: str | None
    alternative_uncached_tokens: int
    sequence: int
    """Order of first reservation in the pool."""
    late: bool = False
    """It stepped behind: it cannot make its deadline any more (order ``deadline`` only). Decided on arrival, for all
    held requests whenever there is room to give away, and by ``grant_overdue``."""
    surplus: bool = False
    """It stepped behind when its instance held all the late work that it may: its replica is to turn it away."""


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """One instance's queue, in the order in which requests would be granted."""

    now_ms: int
    load: InstanceLoad
    held: tuple[RequestRecord, ...]
    alternatives: Mapping[str, InstanceLoad]
    """Loads of the other candidates of the held requests."""


@value
class FinishFacts:
    """What a finished request teaches: how many bytes of text make a token."""

    prompt_bytes: int
    prompt_tokens: int
    """As the instance counted it (``usage.prompt_tokens``)."""


class MigrateStatus(StrEnum):
    MIGRATED = "migrated"
    NOT_HELD = "not_held"
    """Granted, finished or moved meanwhile: nothing changed."""
    NOT_READY = "not_ready"
    """The target is not ready, or does not take requests (role ``decode``): nothing changed."""
    QUEUE_FULL = "queue_full"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One routed request as the hotness keeper reads it."""

    entry_id: str
    """Position in the pool's arrival log; pass the last one seen to read on."""
    at_ms: int
    head: tuple[int, ...]
    """The first hashes of its chain (the store keeps a bounded number)."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Everything about a pool, for people and metrics. Not a hot-path call."""

    now_ms: int
    epoch: int
    tree_version: int
    instances: Mapping[str, InstanceSpec]
    loads: Mapping[str, InstanceLoad]
    requests: tuple[RequestRecord, ...]
    replicas: tuple[ReplicaInfo, ...]
    leader: Lease | None
    migrations: Mapping[str, int]
    """Migrated requests by reason, since the pool began."""


class PoolStore(Protocol):
    """One pool's shared state. Every method raises ``StoreUnavailableError`` when the store is out of reach."""

    name: str

    @property
    def degraded(self) -> bool:
        """Whether the shared state is out of reach and this process decides alone, by what it knows."""

    # members ---------------------------------------------------------------------------------------------
    async def membership(self) -> Membership:
        """The whole rarely-changing part; called when an Observation shows a newer epoch or tree version."""

    async def put_instance(self, spec: InstanceSpec) -> None:
        """Add an instance, or update the description of a known one (its load, queue and state stay)."""

    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        """Change the named fields of an instance's description, any of ``InstanceSpec``'s but its id and state; the
        others stay as they are. False (and no change) if the instance is unknown. ``fence`` as below."""

    async def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
    ) -> bool:
        """Change the state; False (and no change) if unknown or not in the ``expected`` state.

        With ``fence`` given it is the leader's write: LeaseLostError when a newer leader exists or the lease
        has run out. Operators' writes carry none.

        Going DOWN or STARTING forgets the instance's KV metadata: a restarted engine has an empty cache, and nobody
        looks at an engine on standby.
        """

    async def remove_instance(self, instance_id: str) -> bool:
        """Forget an instance; False if it still has queued or running requests, or is unknown."""

    # the life of a request -------------------------------------------------------------------------------
    async def observe(self, instance_ids: Sequence[str], chain: Chain, *, horizon: bool = False) -> Observation:
        """Loads of the named instances and their hits of ``chain``.

        With ``horizon`` also the ready instances that were last given the chain's deepest known mark
        (``scheduling.prefix_holders``) and the lightest ones, in the same round trip. Holders are only remembered in
        pools whose policy looks beyond its candidates.
        """

    async def reserve_idle(
        self, instance_ids: Sequence[str], newcomer: Newcomer
    ) -> tuple[Observation, IdlePlacement | None]:
        """``observe`` with the horizon, and ``reserve`` in the same step where nothing is left to weigh.

        One of the instances is reserved if it is an ``idle_holder`` by ``scheduling.idle_holder``, has room, and the
        request would not step behind its deadline there: then it is dispatched.
        None: nothing was reserved. An id that is known, whoever's it is, reserves nothing: that is for ``reserve`` to
        settle. What was seen is as it was before the reservation. For one or two instances, and for pools whose policy
        has an ``idle_holder_cost``.

        Unlike a transition it is not to be repeated after a lost answer: ``finish`` the request, or ``reserve`` it.
        """

    async def reserve(self, reservation: Reservation) -> ReserveOutcome:
        """Queue the request on the instance, count its tokens, dispatch it at once if there is room.

        Room: nothing else is queued before it (those that stepped behind do not count), dispatched tokens are under
        the dispatch window and running requests under their maximum. ``scheduling.queue_order`` says who is granted
        when there is room. On success the chain enters the instance's KV metadata, the arrival log and the load window.
        ``uncached_tokens`` are those of the reservation until the order plans or grants; then they are counted anew by
        the blocks that the instance was given, those of requests dispatched there before.
        A repetition of the same attempt reports HELD or DISPATCHED as it stands now.
        """

    async def first_token(self, request_id: str, instance_id: str, chain: Chain, *, seen: bool = True) -> bool:
        """The prefill is done: release pending tokens, stamp the prefill clock, learn the prefill rate and TTFT,
        confirm the KV metadata (of a request that was moved or adopted), grant who is next.

        Not ``seen``, but presumed from expected times: nothing is learned from it. TTFT is learned from the requests
        that their instance served as they came: first attempts, neither migrated nor behind their deadline.

        False if the request is unknown, elsewhere, or already past this point.
        """

    async def finish(
        self,
        request_id: str,
        *,
        replica_id: str | None = None,
        attempt: int | None = None,
        facts: FinishFacts | None = None,
    ) -> bool:
        """Release all that is left of the request and grant who is next; False if nothing was left.

        With ``replica_id`` given, another replica's request of the same id is left alone: a replica that gave up before
        it heard DUPLICATE has nothing to release. With ``attempt`` given, a newer attempt is left alone.
        """

    def grants(self, replica_id: str) -> Stream[Grant]:
        """Grants for this replica's held requests as they happen. Some may be lost with a connection: the truth is in
        ``records``."""

    async def records(self, request_ids: Sequence[str]) -> Mapping[str, RequestRecord]:
        """Records of the named requests that still exist."""

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        """Renew the replica's lease; False if the store did not know it (first beat, expiry, empty store):
        the replica then adopts its live requests again."""

    async def adopt(self, records: Sequence[RequestRecord]) -> int:
        """Enter live requests that the store may have lost, as they are; known ones stay. Returns how many. Atomic for
        each instance."""

    async def requests_of(self, replica_id: str) -> Sequence[RequestRecord]:
        """The replica's live requests, those first reserved first, in a large pool not all of one moment; not for the
        hot path."""

    async def retire(self, replica_id: str) -> None:
        """Drop the replica's lease on a clean exit."""

    # the leader's work -----------------------------------------------------------------------------------
    # Every method with ``fence`` raises LeaseLostError when a newer leader exists or the lease has run out.
    async def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        """Become leader if nobody is; renewing is ``renew_lease``. None if somebody else leads."""

    async def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        """Extend. Raises LeaseLostError if lost."""

    async def release_lease(self, lease: Lease) -> None:
        """Step down; harmless if already lost."""

    async def loads(self) -> Mapping[str, InstanceLoad]:
        """Loads of every known instance by id, without hits, in a large pool not all of one moment; for sweeps."""

    async def queue(self, instance_id: str) -> QueueSnapshot | None:
        """The instance's queue and, read after it, the loads that a rebalance plan needs; None if unknown."""

    async def migrate(
        self, request_id: str, source_id: str, target_id: str, *, reason: str, fence: int
    ) -> MigrateStatus:
        """Move a held request and its pending tokens to another instance's queue, and dispatch it at once if there is
        room. It counts with ``alternative_uncached_tokens`` at its other candidate and with its full prompt anywhere
        else, until it is counted anew there as after a reservation. The source becomes its other candidate."""

    async def grant_overdue(self, *, fence: int) -> int:
        """Grant whoever was held for ``max_hold_s``, on every instance with held requests, atomically for each and
        whether it has room or not (under order ``fifo`` nobody is overdue). Returns how many were dispatched.

        Called every second by the leader, so that an instance on which nothing happens holds nobody longer.
        """

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        """Instances that reservations found overloaded since the last call, oldest first; waits up to
        ``timeout_s`` for one. Each is handed out once."""

    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        """The arrival log behind entry ``after`` ('0' = from its start), oldest first."""

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int) -> int:
        """Replace the hotness tree (with its counters, for people); returns the new tree version."""

    async def expired_replicas(self) -> Mapping[str, bool]:
        """Replicas whose lease ran out; True for those that retired. A replica without a lease is given a first one
        when a request of it is entered, so no request is without."""

    async def reap(self, replica_id: str, *, fence: int) -> int:
        """Finish every request of an expired replica, the latest first, and forget it; returns how many. Atomic for
        each request: a replica that comes back halfway keeps the rest, and one that is alive is left alone."""

    async def repair(self, *, fence: int) -> int:
        """Recompute each instance's sums from its requests, atomically for each; returns how many of them were off."""

    # people ----------------------------------------------------------------------------------------------
    async def snapshot(self) -> PoolSnapshot:
        """Everything, for admin, inspect and metrics."""


class Store(Protocol):
    """A connection to where pools live."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ping(self) -> float:
        """Round trip in seconds. Raises StoreUnavailableError."""

    def pool(self, name: str) -> PoolStore: ...
