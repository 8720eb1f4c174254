"""The store contract: what every implementation promises.

A store holds one pool's shared truth: members, loads, queues, KV metadata, hotness, leases. It keeps books and decides
nothing: it checks a precondition, moves counts and memberships, and answers what it found. Unless it says otherwise, a
method is atomic: its effect is seen whole or not at all, by every replica in the same order. Every transition of a
request is idempotent: a repetition after a lost answer changes nothing and reports the state as it is.

Times are milliseconds of the store's own clock (Redis ``TIME``); no caller's clock enters. The states of a request are
in ``scheduling.request``. A transition that leaves room where requests are held replies the head of that queue: the
caller plans it (``scheduling.queue_order``) and commits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from scheduling.chain import Chain
from scheduling.granting import CommitReply, Grant
from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.learned import Learned
from scheduling.learning import Sample
from scheduling.placement import Observation, Placement, PlaceReply
from scheduling.queue_order import QueueHead, QueuePlan
from scheduling.rebalance import HotQueue
from scheduling.request import Request
from scheduling.scale_record import ScaleEntry, ScaleRecord
from scheduling.values import value
from statestore.kv_events import KvEventStore
from statestore.leases import Lease, ReplicaInfo

STORED_RESPONSES = 10_000
"""Of which the length is kept, see ``PoolStore.keep_response``."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The part of the state that replicas keep a copy of."""

    epoch: int
    tree_version: int
    instances: Mapping[str, InstanceSpec]
    tree: HotnessTree
    learned: Learned
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Scheduling settings that were changed in the running fleet, by dotted name."""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """One change of scheduling settings in the running fleet."""

    at_ms: int
    by: str
    changes: Mapping[str, Any]
    """By dotted name; None: back to the configured value."""


@value
class Release:
    """What a request needs no more. Its first token came: it has no pending tokens any more, and the prefill clock is
    stamped. Or it is over, and nothing is left of it."""

    request_id: str
    instance_id: str = ""
    """Where its first token came; empty: it is over."""
    replica_id: str = ""
    """Another replica's request of this id is left alone: one that gave up before it heard DUPLICATE has nothing to
    release. Empty: any."""
    attempt: int | None = None
    """A newer attempt is left alone; None: any."""
    note: str = ""
    """JSON that is logged for the leader, see ``scheduling.learning``; empty: nothing is."""


@value
class Transition:
    """What a transition did, and the queue of its instance where that has room now. Of releases that share a call, the
    last one of an instance is told its queue."""

    done: bool
    queue: QueueHead | None = None


NOTHING_DONE = Transition(False)


class MigrateStatus(StrEnum):
    MIGRATED = "migrated"
    NOT_HELD = "not_held"
    """Granted, finished or moved meanwhile: nothing changed."""
    NOT_READY = "not_ready"
    """The target is not ready, or does not take requests (role ``decode``): nothing changed."""
    QUEUE_FULL = "queue_full"


@value
class Migration:
    """What became of a move, and the target's queue where that has room."""

    status: MigrateStatus
    queue: QueueHead | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One routed request as the hotness keeper reads it."""

    entry_id: str
    """Position in the pool's arrival log; pass the last one seen to read on."""
    at_ms: int
    head: tuple[int, ...]
    """The first hashes of its chain (the store keeps a bounded number)."""


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """A pool's loads, replicas and leader, without its requests: its cost grows with the number of instances alone."""

    now_ms: int
    loads: Mapping[str, InstanceLoad]
    """Of every member, by id in id order, without hits."""
    replicas: tuple[ReplicaInfo, ...]
    leader: Lease | None
    migrations: Mapping[str, int]
    """Migrated requests by reason, since the pool began."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot(PoolOverview):
    """Everything about a pool, for people and metrics. Not a hot-path call."""

    epoch: int
    tree_version: int
    instances: Mapping[str, InstanceSpec]
    requests: tuple[Request, ...]
    """Those first reserved first; in a large pool not all of one moment."""

    def requests_of(self, replica_id: str) -> Sequence[Request]:
        return [request for request in self.requests if request.replica_id == replica_id]


class PoolStore(KvEventStore, Protocol):
    """One pool's shared state. Every method raises ``StoreUnavailableError`` when the store is out of reach.

    A write with a ``fence`` is the leader's: LeaseLostError when a newer leader exists or the lease has run out.
    Operators' writes carry none."""

    name: str

    @property
    def degraded(self) -> bool:
        """Whether the shared state is out of reach and this process decides alone, by what it knows."""

    def recover_from(self, live: Callable[[int], Sequence[Request]], rates: Callable[[], Mapping[str, float]]) -> None:
        """Set the functions that return the live requests of this process at a time of the store's clock, which a
        recovery enters again, and the prefill rates that it knows. Stores that are never away do not call them."""

    # members ---------------------------------------------------------------------------------------------
    async def membership(self) -> Membership:
        """The whole rarely-changing part; read when a reply shows another epoch or tree version, and at intervals."""

    async def put_instance(self, spec: InstanceSpec) -> None:
        """Add an instance, or update the description of a known one (its load, queue and state stay)."""

    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        """Change the named fields of an instance's description, any of ``InstanceSpec``'s but its id and state. False
        if the instance is unknown."""

    async def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
        keeps_cache: bool = False,
    ) -> bool:
        """Change the state; False if unknown or not in the ``expected`` state.

        Going DOWN or STARTING forgets the instance's KV metadata: a restarted engine has an empty cache, and an engine
        on standby is not monitored. With ``keeps_cache`` it is not forgotten: nothing shows that the engine ended.
        """

    async def remove_instance(self, instance_id: str) -> bool:
        """Forget an instance; False if it still has queued or running requests, or is unknown."""

    async def change_settings(self, changes: Mapping[str, Any], *, by: str) -> None:
        """Change scheduling settings for every replica and worker; None for a name reverts its change. The epoch grows,
        and each replica applies the change after its next reply."""

    async def settings_history(self, limit: int) -> Sequence[SettingsChange]:
        """The last changes, the latest first."""

    # the life of a request -------------------------------------------------------------------------------
    async def place(self, placement: Placement) -> PlaceReply:
        """Weigh, choose and reserve in one step; see ``scheduling.placement``.

        Dispatched at once if nothing is queued on the instance and it has room: dispatched tokens are under the
        dispatch window and running requests under their maximum. On success the chain enters the instance's KV
        metadata, as resident if it was dispatched, else as reserved; the prefix index and the arrival log. A retry
        (attempt above 1) is accepted even if the queue is full: its request was admitted before.
        """

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        """Loads of the named instances and their hits of ``chain``."""

    async def commit(self, plan: QueuePlan, *, replica_id: str = "") -> CommitReply:
        """Carry a plan out, if the instance is of the plan's version; else reply the queue as it is now.

        A request is counted again when it is dispatched, by the blocks that are resident then, and its chain becomes
        resident. A message goes to its replica, except to ``replica_id``: the caller learns it from the reply.
        """

    async def release(self, releases: Sequence[Release]) -> Sequence[Transition]:
        """What each says, in their order, in few calls. Not done where nothing was left to release."""

    def on_grant(self, replica_id: str, deliver: Callable[[Grant], None]) -> None:
        """Have ``deliver`` called with grants of this replica's held requests as they happen, until the store is
        closed. Some may be lost with a connection; ``records`` is authoritative."""

    async def records(self, request_ids: Sequence[str]) -> Mapping[str, Request]:
        """Records of the named requests that still exist."""

    async def keep_response(self, response_id: str, tokens: int) -> None:
        """Remember how long the conversation is that an instance stored under this id. The last ones are kept, at least
        ``STORED_RESPONSES``, and twice as many at most."""

    async def response_tokens(self, response_id: str) -> int:
        """What was kept of it; 0 for an unknown one."""

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        """Renew the replica's lease; False if the store did not know it (first beat, expiry, empty store):
        the replica then enters its live requests again."""

    async def adopt(self, requests: Sequence[Request]) -> int:
        """Enter live requests that the store may have lost, as they are; known ones stay. Returns how many. Atomic for
        each request. Their chains are unknown, so they keep the tokens that they were placed with."""

    async def requests_of(self, replica_id: str) -> Sequence[Request]:
        """The replica's live requests, those first reserved first; not for the hot path."""

    async def retire(self, replica_id: str) -> None:
        """Drop the replica's lease on a clean exit."""

    # the leader's work -----------------------------------------------------------------------------------
    async def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        """Become leader if no worker leads; renewing is ``renew_lease``. None if another worker leads."""

    async def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        """Extend. Raises LeaseLostError if lost."""

    async def release_lease(self, lease: Lease) -> None:
        """Step down; harmless if already lost."""

    async def loads(self) -> Mapping[str, InstanceLoad]:
        """Loads of every known instance by id, without hits; for sweeps."""

    async def queue_head(self, instance_id: str) -> QueueHead | None:
        """The head of an instance's queue, to be planned; None if the instance is unknown."""

    async def queue(self, instance_id: str) -> HotQueue | None:
        """The instance's whole queue in order and, read after it, the loads of the held requests' next best instances;
        None if unknown."""

    async def migrate(self, request: Request, target_id: str, *, reason: str, fence: int) -> Migration:
        """Move a held request from its instance to another one's queue. It is counted by the hits there, where its
        chain is known, else with its full prompt. The source becomes its next best instance."""

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        """Instances that placements found overloaded since the last call, oldest first; waits up to
        ``timeout_s`` for one. Each is handed out once."""

    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        """The arrival log after entry ``after`` ('0' = from its start), oldest first."""

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int) -> int:
        """Replace the hotness tree (with its counters, for people); returns the tree version, which grows when the
        set of hot prefixes changes."""

    async def samples(self, after: str, limit: int) -> Sequence[Sample]:
        """Samples of first tokens and prompt lengths, after entry ``after`` ('0' = from the start of the log)."""

    async def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float], *, fence: int) -> None:
        """Publish what was learned: of the pool, and the prefill rates of instances."""

    async def expired_replicas(self) -> Mapping[str, bool]:
        """Replicas whose lease ran out; True for those that retired. A replica without a lease is given a first one
        when a request of it is entered, so no request is without."""

    async def reap(self, replica_id: str, *, fence: int) -> int:
        """Finish every request of an expired replica, and forget it; returns how many. Atomic for
        each request: a replica that comes back halfway keeps the rest, and one that is alive is left alone."""

    async def repair(self, *, fence: int) -> int:
        """Recompute each instance's counts from its requests, atomically for each; returns how many of them were
        wrong. Correct ones are not written."""

    async def now_ms(self) -> int: ...

    async def scaling(self) -> ScaleRecord:
        """The last scaling decision and what came of it; that of a pool that never scaled has number 0."""

    async def record_scaling(self, record: ScaleRecord, entry: ScaleEntry, *, fence: int) -> None:
        """Replace the record, and add a line to the log, which keeps the last ones."""

    async def scaling_log(self, limit: int) -> Sequence[ScaleEntry]:
        """The last lines of the log, the latest first."""

    async def recent_blocks(self, instance_ids: Sequence[str], limit: int) -> Mapping[str, Sequence[int]]:
        """The hashes that each instance was last given, at most ``limit`` of each; empty for an unknown one."""

    # people ----------------------------------------------------------------------------------------------
    async def snapshot(self) -> PoolSnapshot:
        """Everything, for admin and inspect. Its cost grows with the number of live requests."""

    async def overview(self) -> PoolOverview:
        """Loads, replicas and leader, for metrics and live displays."""


class Store(Protocol):
    """A connection to where pools live."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ping(self) -> float:
        """Round trip in seconds. Raises StoreUnavailableError."""

    def pool(self, name: str) -> PoolStore: ...
