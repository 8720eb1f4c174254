"""Changes that are derived here from what was read, and made if it is still so: members, leases, publications, repairs,
KV events, moves, recovery.

No request waits for one, so it may take two round trips, and a third where another caller was faster.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, TypeVar

import orjson

from dualmap.statestore.errors import StoreError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.calls import Argument, Calls, Command
from dualmap.statestore.pool.readable import is_readable

MAX_ATTEMPTS = 64
"""Attempts to make a change while others write the same keys."""

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Change:
    """Commands that run together, and new values in the records of instances."""

    commands: Sequence[Command] = ()
    read: Sequence[tuple[bytes, str, bytes | None]] = ()
    """Key, field, text: what it was derived from; None: there was no such field."""
    fence: int | None = None
    """Fence of the leader that makes the change."""
    instances: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changed fields of instance records, by id and name; what is gone stays so. Cached blocks are counted in any case.
    """
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Increments of counts, by id and name: they depend on nothing that others change meanwhile."""
    _: KW_ONLY
    counted: bool = False
    """Plans for these instances were made for other figures."""
    drawn: Sequence[str] = ()
    """The draws of requests that the store lost, as their records have them: they are entered again."""
    queue_of: str = ""
    """The instance whose queue is replied, where that has room then."""
    stamped: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Fields of instance records that become the time of the change, by id."""
    mistyped: Mapping[bytes, bytes] = field(default_factory=dict)
    """Keys, each with its right type, that are deleted. Nothing is changed unless all of them are of another type."""

    @property
    def is_empty(self) -> bool:
        return not (self.commands or self.instances or self.counts or self.mistyped) and self.fence is None


class Changes:
    """The common part of a ``PoolStore``'s parts: its keys, its server, and how they change what is kept."""

    def __init__(self, keys: PoolKeys, calls: Calls) -> None:
        self._keys = keys
        self._calls = calls

    def _run(self, script: str, *arguments: Argument) -> Awaitable[Any]:
        return self._calls.script(script, self._keys.base, *arguments)

    async def _make(self, change: Change) -> list[Any] | None:
        """The store's time, what each command replied, and the queue of ``queue_of``; None where something was read
        that is otherwise by now. Raises LeaseLostError."""
        about = {
            "read": [*_conditions(change)],
            "mistyped": [*change.mistyped.items()],
            "instances": {
                name: (change.instances.get(name, {}), change.counts.get(name, {}), change.stamped.get(name, ()))
                for name in change.instances.keys() | change.counts.keys()
            },
            "counted": change.counted,
            "drawn": change.drawn,
            "queue_of": change.queue_of,
        }
        words: list[Argument] = []
        for command in change.commands:
            words += (len(command), *command)
        fence = "" if change.fence is None else change.fence
        made: list[Any] | None = await self._run(
            "change_pool", fence, orjson.dumps(about, default=bytes.decode), *words
        )
        return made

    async def _derive(self, derive: Callable[[], Awaitable[tuple[Reply, Change]]]) -> Reply:
        """The answer, once the change that was read and derived with it is made.

        Raises:
            StoreError: others changed it at every attempt.
        """
        return (await self._derive_made(derive))[0]

    async def _derive_made(self, derive: Callable[[], Awaitable[tuple[Reply, Change]]]) -> tuple[Reply, Sequence[Any]]:
        """Derive and make a change like ``_derive``; returns also what ``_make`` returned."""
        # A change is a compare-and-set: one script checks all that was read, so a lost race means reading again.
        for _ in range(MAX_ATTEMPTS):
            answer, change = await derive()
            made = () if change.is_empty else await self._make(change)
            if made is not None:
                return answer, made
        raise StoreError("it is changed by others again and again; try again later")


_PACKED_BYTES: Final = 1000
"""More bytes than the fleet packs into one text."""


def _conditions(change: Change) -> Iterator[tuple[bytes, str, bytes | bool | list[int]]]:
    """The values that must still stand: packed ones by their bytes, as JSON has none. Longer bytes that are no text
    were not written by the fleet, whose writers replace them."""
    for key, name, text in change.read:
        if text is None or is_readable(text.decode):
            yield key, name, False if text is None else text
        elif len(text) <= _PACKED_BYTES:
            yield key, name, [*text]
