"""One pool on Redis: members, the life of a request, replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import orjson

from scheduling.chain import Chain
from scheduling.granting import CommitReply, Grant
from scheduling.instance import InstanceSpec, InstanceState
from scheduling.placement import Observation, Placement, PlaceReply
from scheduling.queue_order import QueueOrder, QueuePlan
from scheduling.request import Request
from scheduling.settings import SchedulingSettings, with_overrides
from statestore.base import Membership, PoolOverview, PoolSnapshot, Release, SettingsChange, Transition
from statestore.errors import StoreError
from statestore.keys import PoolKeys
from statestore.memory.members import EMPTY_CACHE, SETTINGS_HISTORY
from statestore.redis import codec
from statestore.redis.calls import Argument, Calls, ClientCalls, Command
from statestore.redis.kv_events import KvEventCalls
from statestore.redis.placing import arguments_of, reply_from
from statestore.redis.scaling import ScalingCalls
from statestore.redis.subscriber import GrantSubscriber
from statestore.redis.turns import Turn
from statestore.stream import Stream

MAX_PLACEMENTS, MAX_RELEASES = 16, 64
"""That share a script at most: it stops everything else, and its memory is not reused before it ends."""

MAX_ATTEMPTS = 64
"""To change the description of an instance that others change at the same time."""


class RedisPool(KvEventCalls, ScalingCalls):
    """``PoolStore`` on Redis. Every transition of a request is one script."""

    degraded = False

    def __init__(
        self,
        name: str,
        keys: PoolKeys,
        calls: Calls,
        scheduling: SchedulingSettings,
        *,
        waiting: ClientCalls,
        subscriber: GrantSubscriber,
    ) -> None:
        super().__init__(keys, calls, QueueOrder.of(scheduling), waiting)
        self.name = name
        self._configured = scheduling
        self._overrides: Mapping[str, Any] = {}
        self._subscriber = subscriber
        self._placements = Turn(self._place, MAX_PLACEMENTS)

    def recover_from(self, live: Callable[[int], Sequence[Request]]) -> None:
        """Not used here; ``statestore.failover`` uses it."""

    async def close(self) -> None:
        """Stop listening."""
        await self._subscriber.close()

    # members ---------------------------------------------------------------------------------------------
    async def membership(self) -> Membership:
        found = await self._views.membership()
        if found.overrides != self._overrides:
            self._overrides = found.overrides
            scheduling = with_overrides(self._configured, found.overrides)
            self._order = QueueOrder.of(scheduling)
        return found

    async def put_instance(self, spec: InstanceSpec) -> None:
        changes = {each.name: getattr(spec, each.name) for each in fields(spec)[1:]}
        await self._change(spec.instance_id, lambda known: changes | ({"state": known.state} if known else {}))

    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        return await self._change(instance_id, lambda known: changes if known else None, fence=fence)

    async def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
        keeps_cache: bool = False,
    ) -> bool:
        def changes(known: InstanceSpec | None) -> Mapping[str, Any] | None:
            return {"state": state} if known is not None and expected in (None, known.state) else None

        forgets_cache = state in EMPTY_CACHE and not keeps_cache
        return await self._change(instance_id, changes, fence=fence, forgets_cache=forgets_cache)

    async def _change(
        self,
        instance_id: str,
        changes: Callable[[InstanceSpec | None], Mapping[str, Any] | None],
        *,
        fence: int | None = None,
        forgets_cache: bool = False,
    ) -> bool:
        """Make the changes that an instance as it is described asks for, until no other caller describes it meanwhile.
        False where they are None. Raises StoreError: others described it at every attempt."""
        for _ in range(MAX_ATTEMPTS):
            texts = await self._calls.command("HMGET", self._keys.instance(instance_id).instance, *codec.SPEC_TEXTS)
            known = codec.spec_from(instance_id, texts)
            asked = changes(known)
            former = texts if known is not None else None
            described = (b"", b"") if asked is None else codec.described_as(asked, former)
            read = b"" if former is None else codec.description_in(former[0]) + former[1]
            about = (read, *described, "1" if forgets_cache else "")
            done = await self._run("change_instance", instance_id, "" if fence is None else fence, *about)
            if done or asked is None:
                return bool(done)
        raise StoreError(f"instance {instance_id!r} is changed by others again and again; try again later")

    async def remove_instance(self, instance_id: str) -> bool:
        removed = bool(await self._run("remove_instance", instance_id))
        if removed:
            self._reader.forget(instance_id)
        return removed

    async def change_settings(self, changes: Mapping[str, Any], *, by: str) -> None:
        known = (await self.membership()).overrides
        with_overrides(
            self._configured, {name: given for name, given in {**known, **changes}.items() if given is not None}
        )
        keys, texts = self._keys, {name: orjson.dumps(given) for name, given in changes.items()}
        commands: list[Command] = [
            ("HDEL", keys.settings, name) if given is None else ("HSET", keys.settings, name, texts[name])
            for name, given in changes.items()
        ]
        told = ("by", by, "changes", orjson.dumps(dict(changes)))
        commands.append(("XADD", keys.settings_history, "MAXLEN", "~", SETTINGS_HISTORY, "*", *told))
        await self._calls.together([*commands, ("HINCRBY", keys.meta, "epoch", 1)])

    async def settings_history(self, limit: int) -> Sequence[SettingsChange]:
        entries = await self._calls.command("XREVRANGE", self._keys.settings_history, "+", "-", "COUNT", limit)
        changes = []
        for entry_id, flat in entries:
            told = codec.pairs_from(flat)
            at_ms = int(entry_id.partition(b"-")[0])
            changes.append(SettingsChange(at_ms, told[b"by"].decode(), orjson.loads(told[b"changes"])))
        return changes

    # the life of a request -------------------------------------------------------------------------------
    async def place(self, placement: Placement) -> PlaceReply:
        return await self._placements.ask(placement)

    async def _place(self, placements: Sequence[Placement]) -> Sequence[PlaceReply]:
        arguments = arguments_of(placements, self._configured.max_key_blocks)
        return [reply_from(reply) for reply in await self._run("place_requests", *arguments)]

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        reply = await self._run("observe_instances", codec.pack_chain(chain.hashes), *instance_ids)
        epoch, tree_version, sequence, now_ms, *seen = reply
        found = [each for each in zip(instance_ids, seen[::2], seen[1::2], strict=True) if each[1] is not None]
        loads = {name: self._reader.load(name, record, now_ms, hit) for name, record, hit in found}
        return Observation(int(epoch), int(tree_version), sequence, loads)

    async def commit(self, plan: QueuePlan, *, replica_id: str = "") -> CommitReply:
        steps: list[Argument] = []
        for step in plan.steps:
            steps += [step.request_id, "" if step.deferred_to_ms is None else step.deferred_to_ms]
        about = (plan.instance_id, plan.version, replica_id, plan.passed_over_tokens)
        reply = await self._run("commit_plan", *about, *steps)
        queue, granted = (reply[0], reply[1:]) if reply else (None, ())
        return CommitReply(tuple(map(codec.grant_from, granted)), codec.queue_head_from(queue))

    async def first_token(self, request_id: str, instance_id: str, *, note: str = "") -> Transition:
        return (await self.release((Release(request_id, instance_id, note=note),)))[0]

    async def finish(
        self, request_id: str, *, replica_id: str | None = None, attempt: int | None = None, note: str = ""
    ) -> Transition:
        ended = Release(request_id, replica_id=replica_id or "", attempt=attempt, note=note)
        return (await self.release((ended,)))[0]

    async def release(self, releases: Sequence[Release]) -> Sequence[Transition]:
        told: list[Transition] = []
        for first in range(0, len(releases), MAX_RELEASES):
            parts: list[Argument] = []
            for each in releases[first : first + MAX_RELEASES]:
                attempt = "" if each.attempt is None else each.attempt
                parts += (each.request_id, each.instance_id, each.replica_id, attempt, each.note)
            told += [codec.transition_from(reply) for reply in await self._run("release_requests", "", *parts)]
        return told

    def grants(self, replica_id: str) -> Stream[Grant]:
        return self._subscriber.open(replica_id)

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        return await self._lease(replica_id, lease_ms, info)

    async def retire(self, replica_id: str) -> None:
        await self._lease(replica_id, 0, {})

    async def adopt(self, requests: Sequence[Request]) -> int:
        adopted = 0
        for request in requests:
            record = (codec.placed_of(request), codec.told_of(request))
            adopted += await self._run("adopt_request", request.request_id, self._order.rank_of(request), *record)
        return adopted

    # people ----------------------------------------------------------------------------------------------
    async def snapshot(self) -> PoolSnapshot:
        return await self._views.snapshot()

    async def overview(self) -> PoolOverview:
        return await self._views.overview()
