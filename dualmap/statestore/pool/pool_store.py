"""One pool's shared state, in commands and scripts of Redis.

It is the shared truth about a pool: members, loads, queues, KV metadata, hotness, leases. It keeps books and decides
nothing: it checks a precondition, moves counts and memberships, and replies what it found. Unless it says otherwise, a
call is atomic: its effect is seen whole or not at all, by every replica in the same order. Every transition of a
request is idempotent: a repetition after a lost reply changes nothing and reports the state as it is.

Times are milliseconds of the store's own clock (Redis ``TIME``); no caller's clock enters. The states of a request are
in ``scheduling.state.request``. A transition that leaves room where requests are held replies the head of that queue:
the caller plans it (``scheduling.queues.queue_order``) and commits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from dualmap.scheduling.placing.placement import Observation, PlaceStatus
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import CommitReply, Grant
from dualmap.scheduling.queues.queue_order import QueueHead, QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import Turn
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import MAX_KEY_BLOCKS
from dualmap.scheduling.state.instance import Counts, InstanceLoad
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.state.tier_load import NO_LOAD
from dualmap.scheduling.tenants.budgets import Drawn, DrawnReply, Draws
from dualmap.statestore.call_values import Membership, PoolOverview, PoolSnapshot, Transition
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.leases import ReplicaInfo
from dualmap.statestore.pool import codec, placing
from dualmap.statestore.pool.adapter_registry import AdapterRegistry
from dualmap.statestore.pool.allotments import Allotments
from dualmap.statestore.pool.calls import Argument, Calls, Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.chronicle import Chronicle
from dualmap.statestore.pool.codec import LoadReader, pairs_from
from dualmap.statestore.pool.entered_schema import EnteredSchema
from dualmap.statestore.pool.kv_claims import KvClaims
from dualmap.statestore.pool.leader_lease import LeaderLease
from dualmap.statestore.pool.members import Members
from dualmap.statestore.pool.placing import placements_of
from dualmap.statestore.pool.publications import Publications
from dualmap.statestore.pool.queues import Queues, growth, listed
from dualmap.statestore.pool.readable import UNREADABLE, checks_replies, count_from
from dualmap.statestore.pool.revisions import Revisions
from dualmap.statestore.pool.running_settings import RunningSettings
from dualmap.statestore.pool.runs import Runs, TurnStatus
from dualmap.statestore.pool.schema import OLDEST_BESIDE, OLDEST_FIELD, SCHEMA, SCHEMA_FIELD
from dualmap.statestore.pool.stored_responses import StoredResponses
from dualmap.statestore.pool.tiers import InstanceTierBooks
from dualmap.statestore.pool.upkeep import Upkeep
from dualmap.statestore.pool.usage import UsageBooks
from dualmap.statestore.pool.views import Views
from dualmap.statestore.records import InstanceRecord, pack_chain, placed_of, reported_of

_ADOPTED_TOGETHER = 100
MAX_RELEASES = 64
"""Most releases in one script call: a script stops everything else."""


class PoolStore(Changes):
    """The calls of a replica (``statestore.port.ReplicaPool``), and the parts that others call.

    Every method, of the parts too, raises ``StoreUnavailableError`` when the store is out of reach. A write with a
    ``fence`` is the leader's: LeaseLostError when a newer leader exists or the lease has run out. Operators' writes
    carry none.
    """

    def __init__(self, name: str, keys: PoolKeys, calls: Calls, scheduling: SchedulingSettings) -> None:
        super().__init__(keys, calls)
        self.name: Final = name
        self._reader = LoadReader()
        self.settings: Final = RunningSettings(keys, calls, scheduling)
        self._views = Views(keys, calls, self._reader, self.settings)
        self.members: Final = Members(keys, calls, self._reader)
        self.queues: Final = Queues(keys, calls, self._views, self.settings)
        self.publications: Final = Publications(keys, calls)
        self.chronicle: Final = Chronicle(keys, calls)
        self.responses: Final = StoredResponses(keys, calls)
        self.usage: Final = UsageBooks(keys, calls)
        self.allotments: Final = Allotments(keys, calls)
        self.kv_events: Final = KvClaims(keys, calls)
        self.tiers: Final = InstanceTierBooks(keys, calls)
        self.adapters: Final = AdapterRegistry(keys, calls)
        self.runs: Final = Runs(keys, calls)
        self.revisions: Final = Revisions(keys, calls)
        self.schema: Final = EnteredSchema(keys, calls)
        self.leader_lease: Final = LeaderLease(keys, calls, self.schema)
        self.upkeep: Final = Upkeep(keys, calls, self._views, self.settings, self.release, self.runs)
        self._placements = placements_of(keys.base, calls, MAX_KEY_BLOCKS)
        self.place: Final = self._placements.submit
        """Weigh, choose and reserve in one step; see ``scheduling.placing.placement``.

        Dispatched at once if nothing is queued on the instance and it has room: dispatched tokens are under the
        dispatch window and running requests under their maximum. On success the chain enters the instance's KV
        metadata, as resident if it was dispatched, else as reserved; the prefix index and the arrival log. A retry
        (attempt above 1) is accepted even if the queue is full: its request was admitted before.
        """

    async def close(self) -> None:
        """Stop waiting."""
        await self.queues.close()

    # the life of a request ----------------------------------------------------------------------------
    @checks_replies
    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        """Loads of the named instances and their hits of ``chain``."""
        words = (pack_chain(chain.hashes), chain.block_tokens, chain.prompt_tokens)
        reply = await self._run("observe_instances", *words, *instance_ids)
        epoch, tree_version, sequence, now_ms, tiers, *seen = reply
        loaded = placing.loaded_from(tiers)
        found = [each for each in zip(instance_ids, seen[::2], seen[1::2], strict=True) if each[1] is not None]
        loads = {
            name: self._reader.load(name, record, now_ms, hit, loaded.get(name, NO_LOAD)) for name, record, hit in found
        }
        return Observation(count_from(epoch), count_from(tree_version), loads, now_ms, sequence=sequence)

    @checks_replies
    async def register(self, request: StoredRequest, draws: Draws | None) -> tuple[PlaceStatus, Drawn]:
        """Admit a request that is passed on without being placed: draw from its budgets, from all or none, and keep its
        record, on no instance, until it is released. Returns DISPATCHED, LIMITED or DUPLICATE, and the budgets."""
        packed, divisions = (b"", b"[]") if draws is None else (draws.packed, draws.group.divisions)
        words = (request.request_id, packed, divisions, reported_of(request))
        status, found = await self._run("register_request", *words)
        admitted = PlaceStatus(status.decode())
        if draws is None or not found:
            return admitted, Drawn()
        return admitted, DrawnReply(draws, found, admitted is PlaceStatus.LIMITED).read()

    def admit(self, turns: Sequence[Turn], capacity_tokens: int) -> Awaitable[Sequence[TurnStatus]]:
        """See ``Runs.admit``."""
        return self.runs.admit(turns, capacity_tokens)

    def on_turn(self, replica_id: str, deliver: Callable[[str], None]) -> None:
        """See ``Runs.on_turn``."""
        self.runs.on_turn(replica_id, deliver)

    @checks_replies
    async def queue_head(self, instance_id: str) -> QueueHead | None:
        """The head of an instance's queue, to be planned; None if the instance is unknown."""
        return codec.queue_head_from(await self._run("read_queue", instance_id))

    @checks_replies
    async def commit(self, plan: QueuePlan, *, replica_id: str = "") -> CommitReply:
        """Carry a plan out, if the instance is of the plan's version; else reply the queue as it is now.

        A request is counted again when it is dispatched, by the blocks that are resident then, and its chain becomes
        resident. A message goes to its replica, except to ``replica_id``: the caller learns it from the reply.
        """
        steps: list[Argument] = []
        for step in plan.steps:
            steps += [step.request_id, "" if step.deferred_to_ms is None else step.deferred_to_ms]
        about = (plan.instance_id, plan.version, replica_id, plan.passed_over_tokens)
        reply = await self._run("commit_plan", *about, *steps)
        queue, granted = (reply[0], reply[1:]) if reply else (None, ())
        return CommitReply(tuple(map(codec.grant_from, granted)), codec.queue_head_from(queue))

    @checks_replies
    async def release(self, releases: Sequence[Release], *, lease: bytes = b"") -> list[Transition]:
        """Make the releases in their order, in few calls, and return what each did. A release is not done where nothing
        was left to release. With a ``lease``, all are made only as long as their replica has this one."""
        transitions: list[Transition] = []
        base = self._keys.base
        for first in range(0, len(releases), MAX_RELEASES):
            parts: list[Argument] = [lease]
            for each in releases[first : first + MAX_RELEASES]:
                attempt = "" if each.attempt is None else each.attempt
                seen = "seen" if each.seen else ""
                parts += (
                    each.request_id,
                    each.instance_id,
                    each.replica_id,
                    attempt,
                    each.note,
                    seen,
                    b"" if each.returned is None else each.returned.packed,
                    each.used,
                    codec.counts_of(each.used),
                    "" if each.turn is None else each.turn.text,
                )
            transitions += [
                codec.transition_from(reply) for reply in await self._calls.script("release_requests", base, *parts)
            ]
        return transitions

    def on_grant(self, replica_id: str, deliver: Callable[[Grant], None]) -> None:
        """Have ``deliver`` called with grants of this replica's held requests as they happen, until the store is
        closed. Some may be lost with a connection; ``records`` is authoritative."""

        def delivered(text: bytes) -> None:
            try:
                grant = codec.grant_from(text)
            except UNREADABLE:  # no message of this fleet
                return
            deliver(grant)

        self._calls.listen(self._keys.grants(replica_id), delivered)

    # a replica and its requests -----------------------------------------------------------------------
    @checks_replies
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        """Renew the replica's lease; False if the store did not know it (first beat, expiry, empty store):
        the replica then enters its live requests again. Raises StoreSchemaError as ``LeaderLease.acquire`` does."""
        key, numbers = self._keys.replicas, {SCHEMA_FIELD: SCHEMA, OLDEST_FIELD: OLDEST_BESIDE}
        await self.schema.refuse_newer()

        async def renew() -> tuple[bool, Change]:
            text, now_ms = await self._calls.command("HGET", key, replica_id), await self._calls.now_ms()
            known = codec.lease_of(replica_id, text)
            lease = codec.text_of(ReplicaInfo(replica_id, now_ms + lease_ms, lease_ms, info, schema=SCHEMA))
            renewed: Command = ("HSET", key, replica_id, lease)
            said = [("HSETNX", self._keys.meta, *each) for each in numbers.items()]  # where the store lost it
            is_known = known is not None and known.beaten and known.is_alive(now_ms)
            return is_known, Change((renewed, *said), ((key, replica_id, text),))

        return await self._derive(renew)

    @checks_replies
    async def retire(self, replica_id: str) -> None:
        """End the replica's lease on a clean exit. The entry stays, expired, until a reaper has finished the replica's
        requests and removes it."""
        key, lease = self._keys.replicas, codec.text_of(ReplicaInfo.retired(replica_id))

        async def end() -> tuple[None, Change]:
            text = await self._calls.command("HGET", key, replica_id)
            ended: Command = ("HSET", key, replica_id, lease)
            return None, Change((ended,) if text else (), ((key, replica_id, text),))

        await self._derive(end)

    async def requests_of(self, replica_id: str) -> Sequence[StoredRequest]:
        """The replica's live requests, those first reserved first; not for the hot path."""
        return await self._views.requests_of(replica_id)

    @checks_replies
    async def adopt(self, requests: Sequence[StoredRequest]) -> int:
        """Enter live requests that the store may have lost, as they are; known ones stay. Returns how many. Atomic for
        each request. Their chains are unknown, so they keep the tokens that they were placed with."""
        adopted, instance_of = 0, attrgetter("instance_id")
        for instance_id, group in groupby(sorted(requests, key=instance_of), instance_of):
            mine = list(group)
            for first in range(0, len(mine), _ADOPTED_TOGETHER):
                adopted += await self._adopt(instance_id, mine[first : first + _ADOPTED_TOGETHER])
        return adopted

    async def _adopt(self, instance_id: str, requests: Sequence[StoredRequest]) -> int:
        """Enter the requests of one instance, or with "" those that no instance has."""
        keys, replicas = self._keys, self._keys.replicas
        owners = sorted({request.replica_id for request in requests})

        async def enter() -> tuple[int, Change]:
            common: list[Command] = [("HGET", each, instance_id) for each in (keys.instances, keys.instance_records)]
            common.append(("HMGET", replicas, *owners))
            known = [("HGET", keys.request(request.request_id), "placed") for request in requests]
            common.append(("HGETALL", keys.settings))
            spec, record, leases, changed, *standing = await self._calls.together([*common, *known])
            order = self.settings.order_from(pairs_from(changed))
            lost = [each for each, placed in zip(requests, standing, strict=True) if placed is None]
            if not lost or (instance_id and (spec is None or record is None)):
                return 0, Change()
            commands: list[Command] = []
            now_ms = await self._calls.now_ms()
            for request in lost:
                texts = ("placed", placed_of(request), "told", reported_of(request))
                commands.append(("HSET", keys.request(request.request_id), *texts))
                nowhere = ("ZADD", keys.passed_on, now_ms, request.request_id)
                commands.append(listed(keys, request, order) if instance_id else nowhere)
            metered = await self.usage.taken_back(lost, now_ms)
            commands += metered.commands
            read = [*metered.read, *((keys.request(request.request_id), "placed", None) for request in lost)]
            read += zip([replicas] * len(owners), owners, leases, strict=True)
            drawn = [each.drawn for each in lost if each.drawn]
            commands += self._first_leases(dict(zip(owners, leases, strict=True)), now_ms)
            if spec is None or record is None:
                return len(lost), Change(commands, read, drawn=drawn)
            read.append((keys.instances, instance_id, spec))
            counts = Counts.sum([each.counts for each in lost])
            stamps = {instance_id: dict.fromkeys(InstanceRecord.parse(record).begins(counts), now_ms)}
            grown = growth(counts) | {"version": len(lost) - 1}  # it grows with every change
            return len(lost), Change(commands, read, None, stamps, {instance_id: grown}, counted=True, drawn=drawn)

        return await self._derive(enter)

    def _first_leases(self, owners: Mapping[str, bytes | None], now_ms: int) -> Iterator[Command]:
        """No request is without a lease: what gives one to replicas that have none that runs."""
        for replica_id, text in owners.items():
            lease = codec.lease_of(replica_id, text)
            if lease is None or not lease.is_alive(now_ms):
                first = codec.text_of(ReplicaInfo.first_seen(replica_id, now_ms))
                yield ("HSET", self._keys.replicas, replica_id, first)

    # what is read -------------------------------------------------------------------------------------
    @checks_replies
    async def now_ms(self) -> int:
        """The store's time."""
        return await self._calls.now_ms()

    async def membership(self) -> Membership:
        """The whole rarely-changing part; read when a reply shows another epoch or tree version, and at intervals."""
        return await self._views.membership()

    async def records(self, request_ids: Sequence[str]) -> dict[str, StoredRequest]:
        """Records of the named requests that still exist, and can be read."""
        return await self._views.records(request_ids)

    async def loads(self) -> Mapping[str, InstanceLoad]:
        """Loads of every known instance by id, without hits; for sweeps."""
        return await self._views.loads()

    async def loads_of(self, *instance_ids: str) -> Mapping[str, InstanceLoad]:
        """Loads of those of the named instances that are known, without hits; costs nothing for all others."""
        return await self._views.loads_of(instance_ids)

    async def overview(self) -> PoolOverview:
        """Loads, replicas and leader, for metrics and live displays."""
        return await self._views.overview()

    async def snapshot(self) -> PoolSnapshot:
        """Everything, for admin and inspect. Its cost grows with the number of live requests."""
        return await self._views.snapshot()
