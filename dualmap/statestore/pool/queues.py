"""Queues of held requests: looked at, and moved between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict

from dualmap.scheduling.prompts.cache_groups import last_end
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_log import QUEUE_LOG, QueueStep, StepKind, Wait, WaitEnd, wait_in_queue
from dualmap.scheduling.queues.queue_order import QueueOrder, in_class_order
from dualmap.scheduling.queues.rebalance import MOVE_LIMIT, HotQueue, MigrateStatus, Migration
from dualmap.scheduling.state.instance import Counts
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import UNREADABLE, checks_replies
from dualmap.statestore.pool.running_settings import RunningSettings
from dualmap.statestore.pool.views import Views
from dualmap.statestore.records import (
    HASH_BYTES,
    REQUEST_TEXTS,
    InstanceRecord,
    listed_as,
    placed_of,
    request_from,
)

MAX_WAITS = 16
"""Most queues of one request that are looked at."""
STEPS_READ = 512
"""Steps of a log in one call."""
_MAX_WANTED = 1024
_HELD = RequestState.HELD


class Queues(Changes):
    """The held requests of instances, for jobs that move them."""

    def __init__(self, keys: PoolKeys, calls: Calls, views: Views, settings: RunningSettings) -> None:
        super().__init__(keys, calls)
        self._views = views
        self._settings = settings
        self._waiting = calls.another()
        """Connection for the one call that blocks."""

    async def close(self) -> None:
        """Stop waiting."""
        await self._waiting.close()

    @checks_replies
    async def queue(self, instance_id: str, limit: int = MOVE_LIMIT) -> HotQueue | None:
        """The head of the instance's queue, up to ``limit`` requests in order, and, read after it, the loads of their
        next best instances; None if unknown."""
        loads = await self._views.loads_of((instance_id,))
        if instance_id not in loads:
            return None
        waiting = await self._calls.command("ZRANGE", self._keys.queue(instance_id), 0, limit - 1)
        found = await self._views.records([entry.decode().rpartition(" ")[0] for entry in waiting])
        held = in_class_order(
            each for each in found.values() if each.instance_id == instance_id and each.state is _HELD
        )
        others = sorted({request.alternative_id for request in held if request.alternative_id is not None})
        alternatives = await self._views.loads_of(others) if others else {}
        return HotQueue(await self._calls.now_ms(), loads[instance_id], held, alternatives)

    @checks_replies
    async def waits(
        self, request: str, instance_id: str, slo_ms: int, enqueued_ms: int, since_ms: int, until_ms: int | None
    ) -> Sequence[Wait]:
        """The events of a request in the queue in which it was held from ``since_ms`` on, and in those that it moved
        to from there; see ``wait_in_queue``."""
        waits: list[Wait] = []
        for _ in range(MAX_WAITS):
            steps = await self._steps(instance_id)
            waits.append(wait_in_queue(instance_id, request, slo_ms, enqueued_ms, since_ms, steps, until_ms))
            if waits[-1].end is not WaitEnd.MOVED:
                break
            instance_id, since_ms = waits[-1].moved_to, waits[-1].ended_ms
        return waits

    async def _steps(self, instance_id: str) -> list[QueueStep]:
        """The log of an instance's queue, the oldest step first. One that cannot be read is left out."""
        steps, after = list[QueueStep](), b"0"
        while True:
            log = ("XRANGE", self._keys.queue_log(instance_id), b"(" + after, "+", "COUNT", STEPS_READ)
            entries = await self._calls.command(*log)
            for _, fields in entries:
                with contextlib.suppress(*UNREADABLE):
                    steps.append(codec.queue_step_from(fields))
            if len(entries) < STEPS_READ:
                return steps
            after = entries[-1][0]

    @checks_replies
    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        """Instances that placements found overloaded since the last call, oldest first; waits up to
        ``timeout_s`` for one. Each is handed out once."""
        wanted = self._keys.rebalance_wanted
        taken: list[bytes] = []
        if timeout_s > 0:
            waits_s = max(0.001, timeout_s)  # 0 would be forever
            try:
                first = await self._waiting.command("BZPOPMIN", wanted, waits_s, timeout_s=timeout_s + 1.0)
            except asyncio.CancelledError:
                self._waiting.hang_up()  # or the server would hand the next one to a caller that has left
                raise
            if first is None:
                return ()
            taken.append(first[1])
        made = await self._make(Change((("ZPOPMIN", wanted, _MAX_WANTED),)))
        taken += made[1][::2] if made else ()
        return [member.decode() for member in taken]

    @checks_replies
    async def migrate(self, request: StoredRequest, target_id: str, *, reason: str, fence: int) -> Migration:
        """Move a held request from its instance to another one's queue. It is counted by the hits there, where its
        chain is known, else with its full prompt. The source becomes its next best instance."""
        name, source_id, refused = request.request_id, request.instance_id, Change(fence=fence)
        keys, key = self._keys, self._keys.request(name)

        async def move() -> tuple[MigrateStatus, Change]:
            found: Command = ("HMGET", key, *REQUEST_TEXTS, "chain", "block_tokens")
            of_target = [("HGET", each, target_id) for each in (keys.instances, keys.instance_records)]
            changed: Command = ("HGETALL", keys.settings)
            replies = await self._calls.together((found, *of_target, changed))
            (placed, told, chain, block_tokens), spec, record, overrides = replies
            held = request_from(name, (placed, told))
            if held is None or (held.state, held.instance_id) != (_HELD, source_id):
                return MigrateStatus.NOT_HELD, refused
            there = None if record is None else InstanceRecord.parse(record)
            if there is None or not there.takes_requests(held.leg) or target_id == source_id:
                return MigrateStatus.NOT_READY, refused
            if there.queued_requests >= there.max_queued_requests:
                return MigrateStatus.QUEUE_FULL, refused
            prompt = Chain((), int(block_tokens or 1), held.prompt_tokens)
            hit = await self._hit_blocks(keys.kv(target_id), chain or b"", prompt)
            tokens = prompt.uncached_tokens(hit)
            moved = held.moved(target_id, tokens)
            commands: list[Command] = [
                ("ZREM", keys.queue(source_id), listed_as(held)),
                listed(keys, moved, self._settings.order_from(pairs_from(overrides))),
                ("HSET", key, "placed", placed_of(moved)),
                ("HINCRBY", keys.migrations, reason, 1),
            ]
            now_ms = await self._calls.now_ms()
            logged = codec.queue_step_text(StepKind.MOVED, name, now_ms, target_id)
            commands.append(("XADD", keys.queue_log(source_id), "MAXLEN", "~", QUEUE_LOG, "*", "step", logged))
            grown = growth(moved.counts) | {"assigned_tokens": tokens}
            counts = {source_id: growth(held.counts, -1), target_id: grown}
            # Records are no condition: those of busy instances change many times while this is derived.
            read = ((key, "placed", placed), (keys.instances, target_id, spec))
            begun = there.begins(moved.counts)
            stamps = {target_id: dict.fromkeys(begun, now_ms)} if begun else {}
            change = Change(commands, read, fence, stamps, counts, counted=True, queue_of=target_id)
            return MigrateStatus.MIGRATED, change

        status, told = await self._derive_made(move)
        return Migration(status, codec.queue_head_from(told[-1]) if status is MigrateStatus.MIGRATED else None)

    async def _hit_blocks(self, kv: bytes, chain: bytes, prompt: Chain) -> int:
        """The hit of a prompt's packed chain; none of one that is unknown, and empty."""
        size = HASH_BYTES
        blocks = [chain[first : first + size] for first in range(0, len(chain), size)]
        stamps = await self._calls.command("ZMSCORE", kv, *blocks) if blocks else ()
        inner = [None if stamp is None else codec.is_inner(float(stamp)) for stamp in stamps]
        return last_end(inner, (prompt.prompt_tokens - 1) // prompt.block_tokens)


def listed(keys: PoolKeys, request: StoredRequest, order: QueueOrder) -> Command:
    """The command that lists a request on its instance: in the queue, at its place in this order, or as running."""
    if request.state is _HELD:
        return ("ZADD", keys.queue(request.instance_id), order.rank_of(request), listed_as(request))
    return ("ZADD", keys.running(request.instance_id), request.dispatched_ms, request.request_id)


def growth(counts: Counts, sign: int = 1) -> dict[str, int]:
    """The growth of an instance's counts where such a request comes, or with -1 where it goes."""
    return {name: sign * each for name, each in asdict(counts).items()}
