"""Scheduling settings that were changed in the running fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import OPTIONS, SchedulingSettings, is_setting, no_such_setting, with_overrides
from dualmap.statestore.call_values import SettingsChange
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.logs import last_logged, logged
from dualmap.statestore.pool.readable import checks_replies, each_readable

SETTINGS_HISTORY = 1000
"""Changes of settings that are kept."""


class RunningSettings(Changes):
    """The only owner of the settings in force: the configured ones with the changes that the store keeps. A caller has
    read these with whatever else it decides on, so both are of one moment."""

    def __init__(self, keys: PoolKeys, calls: Calls, configured: SchedulingSettings) -> None:
        super().__init__(keys, calls)
        self._configured = configured
        self._last_order: tuple[Mapping[bytes, bytes], QueueOrder] = {}, queue_order_of(configured)
        """The texts that an order was last made from, and the order: to save its computation."""

    def in_force(self, overrides: Mapping[str, Any]) -> SchedulingSettings:
        """The settings in force with the changes that a ``Membership`` has.

        Raises:
            ValueError: a name is unknown or fixed at the start, or a value is wrong.
        """
        return with_overrides(self._configured, overrides)

    def in_force_after(self, overrides: Mapping[str, Any], changes: Mapping[str, Any]) -> SchedulingSettings:
        """The settings in force once more is changed; None for a name reverts its change. Raises as ``in_force``, also
        where what is to be reverted is no setting, unless a former version changed it, and where the policy does not
        take its options."""
        for name, given in changes.items():
            if given is None and name not in overrides and not is_setting(name):
                raise ValueError(no_such_setting(name))
        after = {name: given for name, given in {**overrides, **changes}.items() if given is not None}
        scheduling = self.in_force(after)
        build_policy(scheduling)
        return scheduling

    def override_from(self, name: str, text: bytes) -> Any:
        """The value that a setting was changed to. Raises ValueError where it is not one."""
        given = orjson.loads(text)
        self.in_force({name: given})
        return given

    def overrides_from(self, texts: Mapping[bytes, bytes]) -> dict[str, Any]:
        """The changes that can be read, by the setting's dotted name. Options that the policy in force does not take
        are left out: they were made for the policy of another configuration."""
        found = each_readable(texts, self.override_from)
        if not found:
            return found
        try:
            build_policy(self.in_force(found))
        except ValueError:
            return {name: given for name, given in found.items() if name.partition(".")[0] != OPTIONS}
        return found

    def order_from(self, texts: Mapping[bytes, bytes]) -> QueueOrder:
        """The queue order in force with these changes."""
        known, order = self._last_order
        if texts != known:
            order = queue_order_of(self.in_force(self.overrides_from(texts)))
            self._last_order = texts, order
        return order

    async def change(self, changes: Mapping[str, Any], *, by: str) -> None:
        """Change scheduling settings for every replica and worker; None for a name reverts its change. The epoch grows,
        and each replica applies the change after its next reply.

        Raises:
            ValueError: a name is unknown or fixed at the start, or a value is wrong.
        """
        self.in_force_after(await self._overrides(), changes)
        keys, texts = self._keys, {name: orjson.dumps(given) for name, given in changes.items()}
        commands: list[Command] = [
            ("HDEL", keys.settings, name) if given is None else ("HSET", keys.settings, name, texts[name])
            for name, given in changes.items()
        ]
        change = SettingsChange(await self._calls.now_ms(), by, dict(changes))
        commands += (*logged(keys.settings_history, change, SETTINGS_HISTORY), ("HINCRBY", keys.meta, "epoch", 1))
        await self._make(Change(commands))

    @checks_replies
    async def restore(self, overrides: Mapping[str, Any]) -> int:
        """Enter changes that the store has lost; what it has stays. Returns how many were entered."""
        found = await self._overrides()
        lost = {name: given for name, given in overrides.items() if name not in found}
        if lost:
            await self.change(lost, by="restored")
        return len(lost)

    @checks_replies
    async def history(self, limit: int) -> Sequence[SettingsChange]:
        """The last changes, the latest first."""
        return await last_logged(self._calls, self._keys.settings_history, SettingsChange, limit)

    @checks_replies
    async def _overrides(self) -> dict[str, Any]:
        return self.overrides_from(pairs_from(await self._calls.command("HGETALL", self._keys.settings)))
