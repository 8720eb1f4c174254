"""The last minutes of a pool, for people who come after something happened: samples of its counts, what happened, the
problems that there were; and who changed its members.

One replica takes a step every few seconds, whichever finds that it is due: a step replaces the record of the one before
in the same change that adds its lines, and is not made if another replica was faster. So the lines are of the fleet,
not of a replica, and need no reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

import msgspec

from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.logs import last_logged, logged
from dualmap.statestore.pool.readable import UNREADABLE, checks_replies

KEPT_SAMPLES: Final = 240
"""Samples that are kept: one every five seconds for twenty minutes."""
KEPT_HAPPENINGS: Final = 500
KEPT_MEMBER_CHANGES: Final = 1000
_AT: Final = "at_ms"
_RECORD: Final = "record"


@dataclass(frozen=True, slots=True)
class PoolSample:
    """A pool at one moment, and what its replicas counted since the one before."""

    at_ms: int
    over_s: float
    """Time since the sample before."""
    _: KW_ONLY
    counts: Mapping[str, int] = field(default_factory=dict)
    """Growth of the replicas' counts by name; none that did not grow."""
    held: int = 0
    overdue: int = 0
    running: int = 0
    ahead_s: float = 0.0
    """Seconds of prefill that the ready instances have ahead, on average."""
    ready: int = 0
    instances: int = 0


@dataclass(frozen=True, slots=True)
class Happened:
    """One thing that happened, in words."""

    at_ms: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class KnownProblem:
    """A problem that there is, or was until a while ago."""

    key: str
    severity: str
    what: str
    why: str
    advice: str
    since_ms: int
    seen_ms: int
    """When it was there last."""
    _: KW_ONLY
    until_ms: int | None = None
    """When it was over; None: it is not."""
    weight: float = 0.0
    """How bad it was when it was worst, which its words are of."""
    from_begin: bool = False
    """The problem was there at the first step: a fleet that starts has problems that need no record once they are
    over."""


@dataclass(frozen=True, slots=True)
class ChronicleRecord:
    """The state that the next step compares with."""

    at_ms: int = 0
    by: str = ""
    _: KW_ONLY
    sampled_ms: int = 0
    """The time of the last sample."""
    states: Mapping[str, str] = field(default_factory=dict)
    """States of the instances by id."""
    notes: Mapping[str, str] = field(default_factory=dict)
    replicas: tuple[str, ...] = ()
    """The living ones."""
    leader: str = ""
    migrations: Mapping[str, int] = field(default_factory=dict)
    hot: Mapping[int, int] = field(default_factory=dict)
    """Hot prefixes with their length."""
    counted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counts of each process, which only grow, by its replica and name."""
    grown: Mapping[str, int] = field(default_factory=dict)
    """The counts since the last sample."""
    problems: tuple[KnownProblem, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A change of an instance by an operator."""

    at_ms: int
    by: str
    action: str
    instance: str
    detail: str = ""
    """The outcome of the change, or what was given with it."""


class Chronicle(Changes):
    """Reads and writes the record of a pool's last minutes."""

    async def now_ms(self) -> int:
        """The store's time."""
        return await self._calls.now_ms()

    async def last_step(self) -> bytes | None:
        """The time of the last step as the store has it, which ``record`` takes; None: there was none."""
        found: bytes | None = await self._calls.command("HGET", self._keys.chronicle, _AT)
        return found

    async def last_record(self) -> ChronicleRecord:
        """The record of the last step; an empty one where there is none that this version can read."""
        text = await self._calls.command("HGET", self._keys.chronicle, _RECORD)
        try:
            return msgspec.json.decode(text or b"{}", type=ChronicleRecord)
        except (msgspec.DecodeError, *UNREADABLE):
            return ChronicleRecord()

    async def record(
        self, record: ChronicleRecord, sample: PoolSample | None, happened: Sequence[Happened], *, after: bytes | None
    ) -> bool:
        """Make a step; False where another one was made since ``last_step`` returned ``after``."""
        key = self._keys.chronicle
        commands: list[Command] = [("HSET", key, _AT, record.at_ms, _RECORD, msgspec.json.encode(record))]
        if sample is not None:
            commands += logged(self._keys.chronicle_samples, sample, KEPT_SAMPLES)
        commands += self._lines(happened)
        return await self._make(Change(commands, read=[(key, _AT, after)])) is not None

    async def note(self, kind: str, text: str) -> None:
        """Add something that happened now."""
        await self._make(Change(self._lines([Happened(await self._calls.now_ms(), kind, text)])))

    async def member_changed(self, by: str, action: str, instance: str, detail: str = "") -> None:
        """Add what somebody did to an instance: to the log of these, and to what happened."""
        change = MemberChange(await self._calls.now_ms(), by, action, instance, detail)
        words = f"{by or 'somebody'}: {action} {instance}" + (f" ({detail})" if detail else "")
        commands = [
            *logged(self._keys.members_history, change, KEPT_MEMBER_CHANGES),
            *self._lines([Happened(change.at_ms, "operator", words)]),
        ]
        await self._make(Change(commands))

    def _lines(self, happened: Sequence[Happened]) -> list[Command]:
        return [
            command for each in happened for command in logged(self._keys.chronicle_happened, each, KEPT_HAPPENINGS)
        ]

    @checks_replies
    async def samples(self, limit: int) -> Sequence[PoolSample]:
        """The last samples, the latest first."""
        return await last_logged(self._calls, self._keys.chronicle_samples, PoolSample, limit)

    @checks_replies
    async def happened(self, limit: int) -> Sequence[Happened]:
        """The last happenings, the latest first."""
        return await last_logged(self._calls, self._keys.chronicle_happened, Happened, limit)

    @checks_replies
    async def member_changes(self, limit: int) -> Sequence[MemberChange]:
        """The last changes of instances, the latest first."""
        return await last_logged(self._calls, self._keys.members_history, MemberChange, limit)
