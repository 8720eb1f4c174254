"""The members of a pool: how they are described, added, changed and removed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import orjson

from dualmap.scheduling.estimates.adapters import Residency
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.model_names import adapter_changes
from dualmap.statestore.call_values import Note
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import KvViewStatus
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.adapters import AdapterUse, adapters_used, residency_changes, uses_from
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import LoadReader, pairs_from
from dualmap.statestore.pool.kv_claims import BOOKED, READ_SO_FAR
from dualmap.statestore.pool.readable import checks_replies
from dualmap.statestore.pool.tiers import tier_keys
from dualmap.statestore.records import described

EMPTY_CACHE = frozenset({InstanceState.DOWN, InstanceState.STARTING})
"""States at whose beginning an instance is believed to hold no KV blocks."""


class Members(Changes):
    """Instances as they are described, and model names that operators added."""

    def __init__(self, keys: PoolKeys, calls: Calls, reader: LoadReader) -> None:
        super().__init__(keys, calls)
        self._reader = reader

    @checks_replies
    async def put_instance(self, spec: InstanceSpec) -> None:
        """Add an instance, or update the description of a known one (its load, queue and state stay)."""
        await self._describe(
            spec.instance_id, lambda known: spec if known is None else replace(spec, state=known.state)
        )

    @checks_replies
    async def enter_all(self, specs: Iterable[InstanceSpec]) -> None:
        """Add instances to a pool that no other process knows."""
        added = {spec.instance_id: self._commands_of(None, spec) for spec in specs}
        commands = [command for each in added.values() for command in each]
        await self._make(Change(commands, instances={name: {} for name in added}, counted=True))

    @checks_replies
    async def adapters(self, instance_ids: Sequence[str]) -> tuple[Mapping[str, tuple[AdapterUse, ...]], int]:
        """The adapters of each instance, the last used first, and the time of the store's clock in ms."""
        reads = [("ZRANGE", self._keys.adapters(name), 0, -1, "WITHSCORES") for name in instance_ids]
        found = await self._calls.together(reads) if reads else ()
        uses = {name: uses_from(flat) for name, flat in zip(instance_ids, found, strict=True)}
        return uses, await self._calls.now_ms()

    @checks_replies
    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        """Change the named fields of an instance's description, any of ``InstanceSpec``'s but its id and state. False
        if the instance is unknown."""
        return await self._describe(instance_id, lambda known: known and replace(known, **changes), fence=fence)

    @checks_replies
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

        def changed(known: InstanceSpec | None) -> InstanceSpec | None:
            return replace(known, state=state) if known is not None and expected in (None, known.state) else None

        forgets_cache = state in EMPTY_CACHE and not keeps_cache
        return await self._describe(instance_id, changed, fence=fence, forgets_cache=forgets_cache)

    @checks_replies
    async def forget_cache(self, instance_id: str) -> bool:
        """Forget the KV metadata of an instance that emptied its cache and runs on; False if it is unknown.

        Its KV events are followed from where they were read to: what it published before is in its cache no more, and
        it says that its cache is empty (``AllBlocksCleared``) with its next computing step only.
        """
        return await self._describe(instance_id, lambda known: known, forgets_cache=True, runs_on=True)

    @checks_replies
    async def describe_instance(
        self,
        instance_id: str,
        change: Callable[[InstanceSpec | None], InstanceSpec | None],
        *,
        fence: int,
        forgets_cache: bool = False,
    ) -> bool:
        """Describe an instance as follows from how it is described now, None where it is unknown, in one step; False
        where that is None, and nothing is changed."""
        return await self._describe(instance_id, change, fence=fence, forgets_cache=forgets_cache)

    async def _describe(
        self,
        instance_id: str,
        change: Callable[[InstanceSpec | None], InstanceSpec | None],
        *,
        fence: int | None = None,
        forgets_cache: bool = False,
        runs_on: bool = False,
    ) -> bool:
        """Describe an instance as follows from how it is described; False where that is None. Its counts stay. One
        whose description or counts are gone or unreadable, by eviction or by hand, is added with an empty cache. With
        ``runs_on`` the cache that is forgotten was emptied by the engine that has it still."""
        name, instances, records = instance_id.encode(), self._keys.instances, self._keys.instance_records
        events = self._keys.kv_events(instance_id)

        async def describe() -> tuple[bool, Change]:
            reads = (("HGET", instances, instance_id), ("HGET", records, instance_id), ("HGET", events, "fence"))
            text, record, claim = await self._calls.together(reads)
            known = None if text is None or record is None else codec.specs_from({name: text}).get(instance_id)
            spec, forgets = change(known), known is None or forgets_cache
            if spec is None or (spec == known and not forgets):
                return spec is not None, Change(fence=fence)
            fields, commands = described(spec), self._commands_of(known, spec)
            if spec != known:
                commands.append(("HINCRBY", self._keys.meta, "epoch", 1))
            if forgets:
                commands += self._forgotten(instance_id, claimed=claim is not None, runs_on=runs_on)
            if spec.adapter_slots and spec.state is not InstanceState.DOWN:
                starts = known is None or not known.adapter_slots or (forgets and not runs_on)
                commands += await self._listed_adapters(None if starts else known, spec)
            stamped = ("work_since_ms", "running_since_ms") if known and known.state is not spec.state else ()
            # The claim is a condition too: forgetting the cache must also end a claim that comes meanwhile.
            read = [(instances, instance_id, text), (events, "fence", claim)]
            if known is None:
                read.append((records, instance_id, record))
            return True, Change(
                commands, read, fence, {instance_id: fields}, stamped={instance_id: stamped}, counted=True
            )

        return await self._derive(describe)

    def _commands_of(self, known: InstanceSpec | None, spec: InstanceSpec) -> list[Command]:
        """The commands that enter this description in the place of the known one."""
        keys, name = self._keys, spec.instance_id
        commands: list[Command] = [("HSET", keys.instances, name, codec.text_of(spec))]
        if known is None:
            commands.append(("HSET", keys.instance_records, name, codec.new_record(spec)))
        elif known.role is not spec.role:
            commands.append(("ZREM", keys.least_loaded(known.role), name))
        return commands

    def _forgotten(self, instance_id: str, *, claimed: bool, runs_on: bool) -> list[Command]:
        """The commands that empty the known cache of an instance and end the claim to its KV events. An engine that
        emptied its own cache keeps its tiers and adapters, and its events are read on."""
        keys, events = self._keys, self._keys.kv_events(instance_id)
        why = ("status", KvViewStatus.ESTIMATE.value, "reason", "the instance emptied its cache")
        fields = BOOKED if runs_on else READ_SO_FAR
        ended: list[Command] = [("HINCRBY", events, "fence", 1), ("HDEL", events, *fields), ("HSET", events, *why)]
        ended_with_it = () if runs_on else (*tier_keys(keys, instance_id), keys.adapters(instance_id))
        emptied = keys.kv(instance_id), keys.kv_names(instance_id), *ended_with_it
        return [("UNLINK", *emptied), *(ended if claimed else ())]

    async def _listed_adapters(self, known: InstanceSpec | None, spec: InstanceSpec) -> list[Command]:
        """The commands by which an instance's order of adapters follows from what its server lists: what it lists
        newly was loaded just now, and what it lists no more is not there under that name."""
        loaded, gone = adapter_changes(known, spec)
        key = self._keys.adapters(spec.instance_id)
        commands: list[Command] = [("ZREM", key, *gone)] if gone else []
        if loaded:
            now_ms = await self._calls.now_ms()
            times = range(now_ms - len(loaded) + 1, now_ms + 1)
            commands += adapters_used(key, spec, dict(zip(loaded, times, strict=True)))
        return commands

    @checks_replies
    async def note_adapters(
        self, spec: InstanceSpec, names: Collection[str], resident: Residency | None = None, *, fence: int
    ) -> None:
        """An instance reports requests of these adapters in flight: those that no known request runs of there are used
        past the fleet, now. What it reports to have corrects the order, see ``residency_changes``."""
        if not spec.adapter_slots:
            return
        key = self._keys.adapters(spec.instance_id)
        uses = uses_from(await self._calls.command("ZRANGE", key, 0, -1, "WITHSCORES"))
        strange = set(names).difference(use.adapter for use in uses if use.running)
        if not strange and resident is None:
            return
        now_ms = await self._calls.now_ms()
        used_ms, gone = residency_changes(uses, resident, now_ms)
        used_ms |= dict.fromkeys(sorted(strange), now_ms)
        commands: list[Command] = [("ZREM", key, *gone)] if gone else []
        if used_ms:
            commands += adapters_used(key, spec, used_ms)
        if commands:
            await self._make(Change(commands, fence=fence))

    @checks_replies
    async def remove_instance(self, instance_id: str, *, fence: int | None = None) -> bool:
        """Forget an instance; False if it still has queued or running requests, or is unknown."""
        keys = self._keys

        async def remove() -> tuple[bool, Change]:
            listed: Command = ("EXISTS", keys.queue(instance_id), keys.running(instance_id))
            reads = (("HGET", keys.instance_records, instance_id), listed)
            record, busy = await self._calls.together(reads)
            if record is None or busy:
                return False, Change()
            described = keys.instances, keys.instance_records, keys.instance_notes
            hashes = *described, keys.instance_tiers, keys.instance_links
            commands: list[Command] = [("HDEL", key, instance_id) for key in hashes]
            commands += [
                ("UNLINK", key(instance_id)) for key in (keys.kv, keys.kv_events, keys.kv_names, keys.queue_log)
            ]
            commands.append(("UNLINK", *tier_keys(keys, instance_id), keys.adapters(instance_id)))
            commands += [("ZREM", key, instance_id) for key in (keys.rebalance_wanted, *map(keys.least_loaded, Role))]
            commands.append(("HINCRBY", keys.meta, "epoch", 1))
            # Every placement writes the record, so one that comes in between makes this change fail, and is seen next.
            return True, Change(commands, ((keys.instance_records, instance_id, record),), fence)

        removed = await self._derive(remove)
        if removed:
            self._reader.forget(instance_id)
        return removed

    @checks_replies
    async def note_instance(self, instance_id: str, text: str | None, *, fence: int) -> None:
        """Say what is wrong with an instance, for people; None: nothing any more. The epoch stays: no replica places by
        it."""
        key = self._keys.instance_notes
        if text is None:
            command: Command = ("HDEL", key, instance_id)
        else:
            command = ("HSET", key, instance_id, orjson.dumps(asdict(Note(text, await self._calls.now_ms()))))
        await self._make(Change([command], fence=fence))

    @checks_replies
    async def notes(self) -> Mapping[str, Note]:
        """Complaints about instances, by id."""
        return codec.notes_from(pairs_from(await self._calls.command("HGETALL", self._keys.instance_notes)))

    @checks_replies
    async def add_name(self, name: str, kind: str) -> None:
        """Serve a further model name: "" for another name of the pool's model, ``lora`` for an adapter that instances
        have without listing it. The epoch grows, so that every replica knows it soon."""
        keys, text = self._keys, kind.encode() or codec.ALIAS
        await self._make(Change((("HSET", keys.names, name, text), ("HINCRBY", keys.meta, "epoch", 1))))

    @checks_replies
    async def remove_name(self, name: str) -> bool:
        """Stop serving a name; False where it was not added."""
        keys = self._keys
        made = await self._make(Change((("HDEL", keys.names, name), ("HINCRBY", keys.meta, "epoch", 1))))
        return made is not None and bool(made[1])

    @checks_replies
    async def restore_names(self, names: Mapping[str, str]) -> int:
        """Enter model names that the store has lost; what it has stays. Returns how many were entered."""
        found = codec.names_from(pairs_from(await self._calls.command("HGETALL", self._keys.names)))
        lost = {name: kind for name, kind in names.items() if name not in found}
        for name, kind in lost.items():
            await self.add_name(name, kind)
        return len(lost)
