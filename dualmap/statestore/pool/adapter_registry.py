"""Adapters that were registered in the running fleet: their records, and what failed to load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Final

import orjson

from dualmap.scheduling.state.registered_adapters import (
    MOST_FORGOTTEN,
    AdapterState,
    RegisteredAdapter,
)
from dualmap.statestore.call_values import Note
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import checks_replies

LONGEST_FAILURE: Final = 300
"""Characters that are kept of an engine's own words."""

Changed = Callable[[RegisteredAdapter | None, Mapping[str, RegisteredAdapter]], RegisteredAdapter | None]
"""The record of a name after the one before, beside all others; None: it stays as it is."""


class AdapterRegistry(Changes):
    """The registered adapters of a pool."""

    @checks_replies
    async def records(self) -> Mapping[str, RegisteredAdapter]:
        """The adapters by name, those that were unloaded among them."""
        return codec.adapters_from(pairs_from(await self._calls.command("HGETALL", self._keys.adapter_records)))

    @checks_replies
    async def change(self, name: str, changed: Changed) -> RegisteredAdapter | None:
        """Write the record of a name as follows from what is there, in one step; returns it, None where nothing was
        changed. ``changed`` may raise: then nothing is. The epoch grows, so that every replica knows it soon. Records
        of unloaded adapters beyond ``MOST_FORGOTTEN`` are dropped."""

        async def derive() -> tuple[RegisteredAdapter | None, Change]:
            records = pairs_from(await self._calls.command("HGETALL", self._keys.adapter_records))
            known = codec.adapters_from(records)
            wanted = changed(known.get(name), known)
            if wanted is None:
                return None, Change()
            made = replace(wanted, since_ms=await self._calls.now_ms())
            key = self._keys.adapter_records
            commands: list[Command] = [("HSET", key, name, made.text()), *self._grown()]
            forgotten = _forgotten({**known, name: made})
            if forgotten:
                commands.append(("HDEL", key, *forgotten))
            return made, Change(commands, ((key, name, records.get(name.encode())),))

        return await self._derive(derive)

    def _grown(self) -> tuple[Command, ...]:
        return (("HINCRBY", self._keys.meta, "epoch", 1),)

    @checks_replies
    async def take_back(self, name: str, registered: RegisteredAdapter, former: RegisteredAdapter | None) -> bool:
        """Undo a registration that no instance could load: the name is as it was ``former``ly, or unloaded. False where
        somebody has changed it since."""
        key = self._keys.adapter_records
        left = former if former is not None else replace(registered, state=AdapterState.UNLOADED)
        commands = (("HSET", key, name, left.text()), *self._grown())
        return await self._make(Change(commands, ((key, name, registered.text()),))) is not None

    @checks_replies
    async def restore(self, adapters: Mapping[str, RegisteredAdapter]) -> int:
        """Enter adapters that the store has lost; what it has stays. Returns how many were entered."""
        key = self._keys.adapter_records
        found = pairs_from(await self._calls.command("HGETALL", key))
        lost = {name: each for name, each in adapters.items() if name.encode() not in found}
        for name, each in lost.items():
            await self._make(Change((("HSET", key, name, each.text()), *self._grown()), ((key, name, None),)))
        return len(lost)

    @checks_replies
    async def note_failure(self, instance_id: str, name: str, text: str | None) -> None:
        """Say for people why an instance does not load an adapter; None: it does by now, or is not to."""
        key, field = self._keys.adapter_failures, _field(instance_id, name)
        command: Command = ("HDEL", key, field)
        if text is not None:
            note = Note(text[:LONGEST_FAILURE], await self._calls.now_ms())
            command = ("HSET", key, field, orjson.dumps(asdict(note)))
        await self._make(Change((command,)))

    @checks_replies
    async def failures(self) -> Mapping[tuple[str, str], Note]:
        """Why adapters are not loaded, by instance and name."""
        found = codec.notes_from(pairs_from(await self._calls.command("HGETALL", self._keys.adapter_failures)))
        return {_named(field): note for field, note in found.items()}


def _field(instance_id: str, name: str) -> str:
    """Ids of instances have no blanks."""
    return f"{instance_id} {name}"


def _named(field: str) -> tuple[str, str]:
    instance_id, _, name = field.partition(" ")
    return instance_id, name


def _forgotten(adapters: Mapping[str, RegisteredAdapter]) -> list[str]:
    """The unloaded adapters to forget: those that were unloaded first, where there are too many."""
    unloaded = sorted((each.since_ms, name) for name, each in adapters.items() if not each.is_registered)
    return [name for _, name in unloaded[: max(0, len(unloaded) - MOST_FORGOTTEN)]]
