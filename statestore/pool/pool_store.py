"""One pool's shared state, in commands and scripts of Redis.

It is the shared truth about a pool: members, loads, queues, KV metadata, hotness, leases. It keeps books and decides
nothing: it checks a precondition, moves counts and memberships, and answers what it found. Unless it says otherwise, a
call is atomic: its effect is seen whole or not at all, by every replica in the same order. Every transition of a
request is idempotent: a repetition after a lost answer changes nothing and reports the state as it is.

Times are milliseconds of the store's own clock (Redis ``TIME``); no caller's clock enters. The states of a request are
in ``scheduling.state.request``. A transition that leaves room where requests are held replies the head of that queue:
the caller plans it (``scheduling.queues.queue_order``) and commits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dualmap.scheduling.placing.placement import Observation
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import CommitReply, Grant
from dualmap.scheduling.queues.queue_order import QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.request import StoredRequest
from dualmap.statestore.answers import Transition
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Argument, Calls
from dualmap.statestore.pool.changes import Change
from dualmap.statestore.pool.kv_events import KvEventCalls
from dualmap.statestore.pool.leases import Leases
from dualmap.statestore.pool.mending import Mending
from dualmap.statestore.pool.placing import placements_of
from dualmap.statestore.pool.readable import UNREADABLE, count_from, reads
from dualmap.statestore.records import pack_chain

STORED_RESPONSES = 10_000
"""Most stored responses of which the length is kept, see ``PoolStore.keep_response``."""
MAX_RELEASES = 64
"""Most releases in one script call: a script stops everything else."""


class PoolStore(Mending, Leases, KvEventCalls):
    """Every method raises ``StoreUnavailableError`` when the store is out of reach.

    A write with a ``fence`` is the leader's: LeaseLostError when a newer leader exists or the lease has run out.
    Operators' writes carry none."""

    degraded = False
    """Whether the shared state is out of reach and this process decides alone, by what it knows."""

    def __init__(self, name: str, keys: PoolKeys, calls: Calls, scheduling: SchedulingSettings) -> None:
        super().__init__(keys, calls, scheduling)
        self.name = name
        self._placements = placements_of(keys.base, calls, scheduling.max_key_blocks)
        self.place = self._placements.submit
        """Weigh, choose and reserve in one step; see ``scheduling.placing.placement``.

        Dispatched at once if nothing is queued on the instance and it has room: dispatched tokens are under the
        dispatch window and running requests under their maximum. On success the chain enters the instance's KV
        metadata, as resident if it was dispatched, else as reserved; the prefix index and the arrival log. A retry
        (attempt above 1) is accepted even if the queue is full: its request was admitted before.
        """

    async def close(self) -> None:
        """Stop waiting."""
        await self._waiting.close()

    @reads
    async def now_ms(self) -> int:
        return await self._calls.now_ms()

    def recover_from(
        self, live: Callable[[int], Sequence[StoredRequest]], rates: Callable[[], Mapping[str, float]]
    ) -> None:
        """Set the functions that return the live requests of this process at a time of the store's clock, which a
        recovery enters again, and the prefill rates that it knows. Here nothing is recovered: ``router.pool.failover``
        does."""

    # the life of a request ----------------------------------------------------------------------------
    @reads
    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        """Loads of the named instances and their hits of ``chain``."""
        reply = await self._run("observe_instances", pack_chain(chain.hashes), *instance_ids)
        epoch, tree_version, sequence, now_ms, *seen = reply
        found = [each for each in zip(instance_ids, seen[::2], seen[1::2], strict=True) if each[1] is not None]
        loads = {name: self._reader.load(name, record, now_ms, hit) for name, record, hit in found}
        return Observation(count_from(epoch), count_from(tree_version), sequence, loads)

    @reads
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

    @reads
    async def release(self, releases: Sequence[Release], *, lease: bytes = b"") -> list[Transition]:
        """Make the releases in their order, in few calls, and return what each did. A release is not done where nothing
        was left to release. With a ``lease``, all are made only as long as their replica has this one."""
        told: list[Transition] = []
        for first in range(0, len(releases), MAX_RELEASES):
            parts: list[Argument] = [lease]
            for each in releases[first : first + MAX_RELEASES]:
                attempt = "" if each.attempt is None else each.attempt
                seen = "seen" if each.seen else ""
                parts += (each.request_id, each.instance_id, each.replica_id, attempt, each.note, seen)
            told += [codec.transition_from(reply) for reply in await self._run("release_requests", *parts)]
        return told

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

    @reads
    async def requests_of(self, replica_id: str) -> Sequence[StoredRequest]:
        """The replica's live requests, those first reserved first; not for the hot path."""
        # The lists are of one moment: a request that moves meanwhile is in one of them.
        return (await self.snapshot()).requests_of(replica_id)

    # upkeep -------------------------------------------------------------------------------------------
    @reads
    async def reap(self, replica_id: str, *, fence: int) -> int:
        """Finish every request of an expired replica, and forget it; returns how many. Atomic for
        each request: a replica that comes back halfway keeps the rest, and one that is alive is left alone."""
        await self._make(Change(fence=fence))
        key, now_ms = self._keys.replicas, await self._calls.now_ms()
        text = await self._calls.command("HGET", key, replica_id)
        lease = codec.lease_of(replica_id, text)
        if lease is None or lease.is_alive(now_ms):
            return 0
        left = [Release(request.request_id, replica_id=replica_id) for request in await self.requests_of(replica_id)]
        told = await self.release(left, lease=text)
        await self._make(Change([("HDEL", key, replica_id)], ((key, replica_id, text),), fence))
        return sum(each.done for each in told)

    # stored responses ---------------------------------------------------------------------------------
    @reads
    async def keep_response(self, response_id: str, tokens: int) -> None:
        """Remember how long the conversation is that an instance stored under this id. The last ones are kept, at least
        ``STORED_RESPONSES``, and twice as many at most."""
        new, old = self._keys.responses_new, self._keys.responses_old
        made = await self._make(Change((("HSET", new, response_id, tokens), ("HLEN", new))))
        if made is not None and made[-1] >= STORED_RESPONSES:
            await self._make(Change((("RENAME", new, old),)))

    @reads
    async def response_tokens(self, response_id: str) -> int:
        """The tokens that were kept of a response; 0 for an unknown one."""
        keys = (self._keys.responses_new, self._keys.responses_old)
        kept = await self._calls.together([("HGET", key, response_id) for key in keys])
        return next((int(tokens) for tokens in kept if tokens is not None), 0)
