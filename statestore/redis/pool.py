"""One pool on Redis: members, the life of a request, replicas."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import orjson

from scheduling.chain import Chain
from scheduling.granting import CommitReply, Grant
from scheduling.instance import InstanceSpec, InstanceState
from scheduling.placement import Observation, Placement, PlaceReply, PlaceStatus
from scheduling.queue_order import QueueOrder, QueuePlan
from scheduling.request import Request
from scheduling.settings import SchedulingSettings, with_overrides
from statestore.base import Membership, PoolOverview, PoolSnapshot, SettingsChange, Transition
from statestore.keys import PoolKeys
from statestore.memory.members import EMPTY_CACHE, SETTINGS_HISTORY
from statestore.redis import codec
from statestore.redis.calls import Calls, ClientCalls, Command
from statestore.redis.kv_events import KvEventCalls
from statestore.redis.leader import LeaderCalls
from statestore.redis.placing import PlaceCalls, PlacedRequests, reply_from
from statestore.redis.subscriber import GrantSubscriber
from statestore.stream import Stream

_PLACED = (PlaceStatus.DISPATCHED, PlaceStatus.HELD)


class RedisPool(LeaderCalls, KvEventCalls):
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
        placed: PlacedRequests,
    ) -> None:
        super().__init__(keys, calls, QueueOrder.of(scheduling), waiting, placed)
        self.name = name
        self._configured = scheduling
        self._overrides: Mapping[str, Any] = {}
        self._subscriber = subscriber
        self._place_calls = PlaceCalls(keys)

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
        await self._describe(spec.instance_id, spec.state.value, None, codec.spec_arguments(spec))

    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        return await self._describe(instance_id, "", fence, codec.field_arguments(changes))

    async def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
    ) -> bool:
        fields, forget = ("state", state.value), "1" if state in EMPTY_CACHE else ""
        return await self._describe(instance_id, "", fence, fields, "" if expected is None else expected.value, forget)

    async def _describe(
        self,
        instance_id: str,
        new_state: str,
        fence: int | None,
        fields: Sequence[str],
        expected: str = "",
        forget_cache: str = "",
    ) -> bool:
        keys = self._keys
        reply = await self._calls.script(
            "describe_instance",
            (
                keys.meta,
                keys.instances,
                keys.leader,
                *keys.instance(instance_id),
                keys.least_loaded,
                *keys.kv_events(instance_id),
            ),
            instance_id,
            new_state,
            "" if fence is None else fence,
            expected,
            forget_cache,
            *fields,
        )
        return bool(reply)

    async def remove_instance(self, instance_id: str) -> bool:
        keys = self._keys
        reply = await self._calls.script(
            "remove_instance",
            (
                keys.meta,
                keys.instances,
                keys.wanted_rebalances,
                *keys.instance(instance_id),
                keys.least_loaded,
                *keys.kv_events(instance_id),
            ),
            instance_id,
        )
        if reply:
            keys.forget_instance(instance_id)
            self._reader.forget(instance_id)
        return bool(reply)

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
        text = await self._calls.packed_script("place_request", self._place_calls.pack(placement))
        reply = reply_from(placement, text)
        if reply.status in _PLACED and reply.instance_id is not None:
            self._placed.put(placement.request.request_id, reply.instance_id)
        return reply

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        keys = [self._keys.meta]
        for instance_id in instance_ids:
            keys += self._keys.instance(instance_id)
        text = await self._calls.script("observe_instances", keys, codec.pack_chain(chain.hashes))
        epoch, tree_version, sequence, now_ms, *seen = orjson.loads(text)
        loads = {
            name: self._reader.load(name, figures, now_ms)
            for name, figures in zip(instance_ids, seen, strict=True)
            if figures is not None
        }
        return Observation(epoch, tree_version, sequence, loads)

    async def commit(self, plan: QueuePlan, *, replica_id: str = "") -> CommitReply:
        keys, steps = self._keys, []
        for step in plan.steps:
            steps += [step.request_id, "" if step.deferred_to_ms is None else step.deferred_to_ms]
            steps.append("1" if step.rejected else "")
        reply = orjson.loads(
            await self._calls.script(
                "commit_plan",
                (
                    *keys.instance(plan.instance_id),
                    keys.least_loaded,
                    *(keys.request(step.request_id) for step in plan.steps),
                ),
                plan.instance_id,
                plan.version,
                keys.grants_channel,
                replica_id,
                plan.passed_over_tokens,
                *steps,
            )
        )
        match reply:
            case ["done", granted, queue]:
                return CommitReply(
                    tuple([Grant(*grant) for grant in granted]), codec.queue_head_from(plan.instance_id, queue)
                )
            case ["stale", queue]:
                return CommitReply(queue=codec.queue_head_from(plan.instance_id, queue))
        return CommitReply()

    async def first_token(self, request_id: str, instance_id: str, *, note: str = "") -> Transition:
        keys = self._keys
        reply = await self._calls.script(
            "prefill_request",
            (keys.request(request_id), keys.samples, *keys.instance(instance_id), keys.least_loaded),
            request_id,
            instance_id,
            note,
        )
        return self._transition(instance_id, reply)

    def finish(
        self, request_id: str, *, replica_id: str | None = None, attempt: int | None = None, note: str = ""
    ) -> Coroutine[Any, Any, Transition]:
        return self._finish(request_id, replica_id=replica_id, attempt=attempt, note=note)

    def grants(self, replica_id: str) -> Stream[Grant]:
        return self._subscriber.open(replica_id)

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        return await self._lease(replica_id, lease_ms, info)

    async def retire(self, replica_id: str) -> None:
        await self._lease(replica_id, 0, {})

    async def adopt(self, requests: Sequence[Request]) -> int:
        adopted, keys = 0, self._keys
        for request in requests:
            self._placed.put(request.request_id, request.instance_id)
            adopted += await self._calls.script(
                "adopt_request",
                (
                    keys.request(request.request_id),
                    keys.replicas,
                    *keys.instance(request.instance_id),
                    keys.least_loaded,
                ),
                request.request_id,
                request.instance_id,
                self._order.rank_of(request),
                *codec.request_arguments(request),
            )
        return adopted

    # people ----------------------------------------------------------------------------------------------
    async def snapshot(self) -> PoolSnapshot:
        return await self._views.snapshot()

    async def overview(self) -> PoolOverview:
        return await self._views.overview()
