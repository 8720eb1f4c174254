"""One pool on Redis: members, the life of a request, replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from scheduling.chain import Chain
from scheduling.granting import CommitReply, Grant
from scheduling.instance import InstanceSpec, InstanceState, Role
from scheduling.placement import Observation
from scheduling.queue_order import QueueOrder, QueuePlan
from scheduling.request import Request
from scheduling.settings import SchedulingSettings, with_overrides
from statestore import base
from statestore.base import Membership, SettingsChange
from statestore.keys import PoolKeys
from statestore.kv_events import KvViewStatus
from statestore.leases import ReplicaInfo
from statestore.memory.members import EMPTY_CACHE, SETTINGS_HISTORY
from statestore.records import InstanceRecord, described, pack_chain
from statestore.redis import codec
from statestore.redis.calls import Argument, Calls, Command
from statestore.redis.changes import Change
from statestore.redis.kv_events import READ_SO_FAR, KvEventCalls
from statestore.redis.leader import LeaderCalls
from statestore.redis.placing import placements_of
from statestore.redis.subscriber import GrantSubscriber


class RedisPool(KvEventCalls, LeaderCalls):
    """``PoolStore`` on Redis. Every transition of a request is one script."""

    degraded = False

    def __init__(
        self,
        name: str,
        keys: PoolKeys,
        calls: Calls,
        scheduling: SchedulingSettings,
        subscriber: GrantSubscriber,
    ) -> None:
        super().__init__(keys, calls, QueueOrder.of(scheduling))
        self.name = name
        self._configured = scheduling
        self._overrides: Mapping[str, Any] = {}
        self._subscriber = subscriber
        self._placements = placements_of(keys.base, calls, scheduling.max_key_blocks)
        self.place = self._placements.ask

    def recover_from(self, live: Callable[[int], Sequence[Request]], rates: Callable[[], Mapping[str, float]]) -> None:
        """Not used here; ``statestore.failover`` uses it."""

    async def close(self) -> None:
        """Stop listening and waiting."""
        await asyncio.gather(self._subscriber.close(), self._waiting.close())

    # members ---------------------------------------------------------------------------------------------
    async def membership(self) -> Membership:
        found = await super().membership()
        if found.overrides != self._overrides:
            self._overrides = found.overrides
            scheduling = with_overrides(self._configured, found.overrides)
            self._order = QueueOrder.of(scheduling)
        return found

    async def put_instance(self, spec: InstanceSpec) -> None:
        await self._describe(
            spec.instance_id, lambda known: spec if known is None else replace(spec, state=known.state)
        )

    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        return await self._describe(instance_id, lambda known: known and replace(known, **changes), fence=fence)

    async def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
        keeps_cache: bool = False,
    ) -> bool:
        def changed(known: InstanceSpec | None) -> InstanceSpec | None:
            return replace(known, state=state) if known is not None and expected in (None, known.state) else None

        forgets_cache = state in EMPTY_CACHE and not keeps_cache
        return await self._describe(instance_id, changed, fence=fence, forgets_cache=forgets_cache)

    async def _describe(
        self,
        instance_id: str,
        change: Callable[[InstanceSpec | None], InstanceSpec | None],
        *,
        fence: int | None = None,
        forgets_cache: bool = False,
    ) -> bool:
        """Describe an instance as follows from how it is described; False where that is None. Its counts stay. One
        whose description or counts are gone, by eviction or by hand, is added with an empty cache."""
        instances, records = self._keys.instances, self._keys.instance_records
        events = self._keys.kv_events(instance_id)

        async def describe() -> tuple[bool, Change]:
            reads = (("HGET", instances, instance_id), ("HGET", records, instance_id), ("HGET", events, "fence"))
            text, record, claim = await self._calls.together(reads)
            known = None if text is None or record is None else codec.spec_from(instance_id, text)
            spec, forgets = change(known), known is None or forgets_cache
            if spec is None or (spec == known and not forgets):
                return spec is not None, Change(fence=fence)
            fields, commands = described(spec), self._commands_of(known, spec)
            if spec != known:
                commands.append(("HINCRBY", self._keys.meta, "epoch", 1))
            if forgets:
                commands += self._forgotten(instance_id, claim is not None)
            if known is not None and known.state is not spec.state and InstanceRecord.parse(record).pending_tokens > 0:
                fields["work_since_ms"] = await self._calls.now_ms()
            read = [(instances, instance_id, text), (events, "fence", claim)]
            if known is None:
                read.append((records, instance_id, record))
            return True, Change(commands, read, fence, {instance_id: fields}, counted=True)

        return await self._derive(describe)

    def _commands_of(self, known: InstanceSpec | None, spec: InstanceSpec) -> list[Command]:
        """What enters this description in the place of the known one."""
        keys, name = self._keys, spec.instance_id
        commands: list[Command] = [("HSET", keys.instances, name, codec.text_of(spec))]
        if known is None:
            commands.append(("HSET", keys.instance_records, name, codec.new_record(spec)))
        elif known.role is not spec.role:
            commands.append(("ZREM", keys.least_loaded(known.role), name))
        return commands

    def _forgotten(self, instance_id: str, claimed: bool) -> list[Command]:
        """What empties the cache of an instance as it is known, and ends the claim to its KV events."""
        keys, events = self._keys, self._keys.kv_events(instance_id)
        why = ("status", KvViewStatus.ESTIMATE.value, "reason", "the instance went down")
        ended: list[Command] = [("HINCRBY", events, "fence", 1), ("HDEL", events, *READ_SO_FAR), ("HSET", events, *why)]
        return [("UNLINK", keys.kv(instance_id), keys.kv_names(instance_id)), *(ended if claimed else ())]

    async def remove_instance(self, instance_id: str) -> bool:
        keys = self._keys

        async def remove() -> tuple[bool, Change]:
            listed: Command = ("EXISTS", keys.queue(instance_id), keys.running(instance_id))
            reads = (("HGET", keys.instance_records, instance_id), listed)
            record, busy = await self._calls.together(reads)
            if record is None or busy:
                return False, Change()
            commands: list[Command] = [("HDEL", key, instance_id) for key in (keys.instances, keys.instance_records)]
            commands += [("UNLINK", key(instance_id)) for key in (keys.kv, keys.kv_events, keys.kv_names)]
            commands += [("ZREM", key, instance_id) for key in (keys.rebalance_wanted, *map(keys.least_loaded, Role))]
            commands.append(("HINCRBY", keys.meta, "epoch", 1))
            return True, Change(commands, ((keys.instance_records, instance_id, record),))

        removed = await self._derive(remove)
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
        change = SettingsChange(await self._calls.now_ms(), by, dict(changes))
        commands += (*self._logged(keys.settings_history, change, SETTINGS_HISTORY), ("HINCRBY", keys.meta, "epoch", 1))
        await self._calls.together(commands)

    async def settings_history(self, limit: int) -> Sequence[SettingsChange]:
        return await self._last_logged(self._keys.settings_history, SettingsChange, limit)

    # the life of a request -------------------------------------------------------------------------------
    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        reply = await self._run("observe_instances", pack_chain(chain.hashes), *instance_ids)
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

    def on_grant(self, replica_id: str, deliver: Callable[[Grant], None]) -> None:
        self._subscriber.listen(replica_id, deliver)

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        key = self._keys.replicas

        async def renew() -> tuple[bool, Change]:
            text, now_ms = await self._calls.command("HGET", key, replica_id), await self._calls.now_ms()
            known = codec.lease_of(replica_id, text)
            lease = codec.text_of(ReplicaInfo(replica_id, now_ms + lease_ms, lease_ms, info))
            renewed: Command = ("HSET", key, replica_id, lease)
            is_known = known is not None and known.beaten and known.is_alive(now_ms)
            return is_known, Change((renewed,), ((key, replica_id, text),))

        return await self._derive(renew)

    async def retire(self, replica_id: str) -> None:
        """The entry stays, expired, until a reaper has finished the replica's requests and removes it."""
        key, lease = self._keys.replicas, codec.text_of(ReplicaInfo.retired(replica_id))

        async def end() -> tuple[None, Change]:
            text = await self._calls.command("HGET", key, replica_id)
            ended: Command = ("HSET", key, replica_id, lease)
            return None, Change((ended,) if text else (), ((key, replica_id, text),))

        await self._derive(end)

    # stored responses ------------------------------------------------------------------------------------
    async def keep_response(self, response_id: str, tokens: int) -> None:
        new, old = self._keys.responses_new, self._keys.responses_old
        _, kept = await self._calls.together((("HSET", new, response_id, tokens), ("HLEN", new)))
        if kept >= base.STORED_RESPONSES:
            await self._calls.together((("RENAME", new, old),))

    async def response_tokens(self, response_id: str) -> int:
        keys = (self._keys.responses_new, self._keys.responses_old)
        kept = await self._calls.together([("HGET", key, response_id) for key in keys])
        return next((int(tokens) for tokens in kept if tokens is not None), 0)
