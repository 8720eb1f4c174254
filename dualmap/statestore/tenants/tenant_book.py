"""The tenants of a running fleet, and the log of who changed what.

A tenant is one text by its name; what is in it is the replicas' business. Every change makes a new edition of the book,
which has a number and a token of its own, and enters one line in the log, which names the edition before. So a replica
that knows an edition finds out with one short read whether there is a newer one, reads from the log which tenants it
has changed, and reads these alone. And it notices where the book was lost: where the log does not lead from the edition
that it knows to the present one, the store came back empty, or as it was some time ago.

A change names the edition that it was derived from, and is made if that is still the present one.

A key of another type than the book's, which somebody else wrote, is deleted (``mend``): nothing in it is the book's. If
tenants, or the edition, were there, the book gets ``MENDED``, the lowest of all editions. So each replica notices that
the book lost the edition that it knows, and puts back the tenants that it has.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from dualmap.statestore.keys import FleetKeys
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.logs import last_logged, logged
from dualmap.statestore.pool.readable import checks_replies, is_readable, readable_texts

log = logging.getLogger(__name__)

LOGGED_CHANGES: Final = 10_000
"""Changes of tenants that are kept in the log."""
READ_TOGETHER: Final = 100
"""Tenants that are read in one call."""
_EDITION: Final = "edition"
MENDED: Final = 1
"""The number of an edition that stands for a lost one. It is not 0: a book that has begun closes a fleet to clients
without a key."""


@dataclass(frozen=True, slots=True)
class Edition:
    """A state of the book."""

    number: int = 0
    token: str = ""
    """Another one for each edition: two books that took different ways have none in common."""

    @property
    def text(self) -> bytes | None:
        """The edition as the store has it; None: the book has not begun."""
        return f"{self.number} {self.token}".encode() if self.number else None

    @classmethod
    def parse(cls, text: bytes | None) -> Edition:
        """Raises ValueError where somebody wrote something else there."""
        if text is None:
            return cls()
        number, token = text.decode().split(" ")
        return cls(int(number), token)


@dataclass(kw_only=True, frozen=True, slots=True)
class TenantChange:
    """One line of the log."""

    at_ms: int
    by: str
    """The administrator, by name."""
    action: str
    tenants: Sequence[str]
    """Names of the tenants that it changed: one, but where a replica put back what the store had lost."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """The fields that changed, as they were; no key, and no hash of one."""
    after: Mapping[str, Any] = field(default_factory=dict)
    edition: int = 0
    token: str = ""
    follows: str = ""
    """The edition that it was made of; empty: none."""


@dataclass(frozen=True, slots=True)
class TenantNews:
    """The news in the book for a reader that knows an edition of it."""

    edition: Edition
    texts: Mapping[str, bytes | None] = field(default_factory=dict)
    """The tenants by name; None: the tenant is removed."""
    whole: bool = False
    """These are all tenants of the book."""
    lost: bool = False
    """The book lost the edition that was known: it is empty, or as it was some time ago."""


class TenantBook(Changes):
    """The book of a fleet."""

    def __init__(self, keys: FleetKeys, calls: Calls) -> None:
        super().__init__(keys, calls)
        self._names: Final = keys

    @checks_replies
    async def news(self, known: Edition | None) -> TenantNews:
        """The changes since an edition; the whole book where none is known, or the log does not reach back to it."""
        edition = Edition.parse(await self._calls.command("HGET", self._names.tenants_meta, _EDITION))
        if edition == known:
            return TenantNews(edition)
        origin, changed = (None, set[str]()) if known is None else await self._traced(known, edition)
        if known is not None and origin == known:
            return TenantNews(edition, await self._texts(sorted(changed)))
        lost = known is not None and origin is not None and origin.number <= known.number
        names = readable_texts(await self._calls.command("HKEYS", self._names.tenants))
        return TenantNews(edition, await self._texts(names), whole=True, lost=lost)

    async def _traced(self, known: Edition, edition: Edition) -> tuple[Edition, set[str]]:
        """Follow the log from an edition back to the number of a known one, or as far as it reaches: the edition found
        there, and the tenants that were changed since. What the log does not have was cut off, and not lost."""
        changed = set[str]()
        if edition.number - known.number > LOGGED_CHANGES:
            return edition, changed
        count = max(0, edition.number - known.number)
        for step in await last_logged(self._calls, self._names.tenants_history, TenantChange, count):
            if edition.number <= known.number or (step.edition, step.token) != (edition.number, edition.token):
                break
            changed.update(step.tenants)
            edition = Edition.parse(step.follows.encode() or None)
        return edition, changed

    async def _texts(self, names: Sequence[str]) -> dict[str, bytes | None]:
        texts: dict[str, bytes | None] = {}
        for first in range(0, len(names), READ_TOGETHER):
            some = names[first : first + READ_TOGETHER]
            texts |= zip(some, await self._calls.command("HMGET", self._names.tenants, *some), strict=True)
        return texts

    @checks_replies
    async def change(
        self,
        known: Edition,
        texts: Mapping[str, bytes | None],
        *,
        by: str,
        action: str,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        beyond: int = 0,
        gone: Collection[str] = (),
    ) -> Edition | None:
        """Enter tenants, or remove those without a text; the new edition, or None where ``known`` is not the present
        one any more. Its number is above ``beyond``. A repetition changes nothing. ``gone`` are budgets that no tenant
        has any more: how they were divided among pools is forgotten. Should one come back, the pools know their parts.
        """
        number, token = max(known.number, beyond) + 1, secrets.token_hex(8)
        edition, now_ms = Edition(number, token), await self._calls.now_ms()
        follows = "" if known.text is None else known.text.decode()
        line = TenantChange(
            at_ms=now_ms,
            by=by,
            action=action,
            tenants=[*texts],
            before=before,
            after=after,
            edition=number,
            token=token,
            follows=follows,
        )
        keys = self._names
        commands: list[Command] = [
            ("HDEL", keys.tenants, name) if text is None else ("HSET", keys.tenants, name, text)
            for name, text in texts.items()
        ]
        if gone:
            commands.append(("HDEL", keys.tenants_allotments, *gone))
        assert edition.text is not None
        commands.append(("HSET", keys.tenants_meta, _EDITION, edition.text))
        commands += logged(keys.tenants_history, line, LOGGED_CHANGES)
        made = await self._make(Change(commands, ((keys.tenants_meta, _EDITION, known.text),)))
        return None if made is None else edition

    @checks_replies
    async def mend(self, known: Edition | None = None, tenants: int = 0) -> bool:
        """Delete keys of another type, and replace an edition that cannot be read, or whose tenants are lost: those
        that were in such a key, and any where the book has fewer than the ``tenants`` of the ``known`` edition. Returns
        whether anything was wrong."""
        keys = self._names
        types = {
            **dict.fromkeys((keys.tenants, keys.tenants_meta, keys.tenants_allotments), b"hash"),
            keys.tenants_history: b"list",
        }
        kinds = await self._calls.together([("TYPE", key) for key in types])
        found = dict(zip(types, kinds, strict=True))
        wrong = {key: right for key, right in types.items() if found[key] not in (right, b"none")}
        edition: bytes | None = None
        is_lost = keys.tenants in wrong or keys.tenants_meta in wrong
        if keys.tenants_meta not in wrong:
            edition = await self._calls.command("HGET", keys.tenants_meta, _EDITION)
            is_lost = is_lost or not is_readable(partial(Edition.parse, edition))
        if not is_lost and known is not None and known.text == edition:
            is_lost = await self._calls.command("HLEN", keys.tenants) < tenants
        if not wrong and not is_lost:
            return False
        for key in wrong:
            log.error("unreadable state mended key=%s: it was a %s, and is deleted", key.decode(), found[key].decode())
        commands: list[Command] = []
        has_begun = bool(edition) or found[keys.tenants_history] != b"none" or found[keys.tenants] == b"hash"
        if is_lost and has_begun:
            log.error("the store lost tenants, or their edition (%r): replicas put back what they know", edition)
            commands.append(("HSET", keys.tenants_meta, _EDITION, f"{MENDED} {secrets.token_hex(8)}"))
        stands = () if keys.tenants_meta in wrong else ((keys.tenants_meta, _EDITION, edition),)
        await self._make(Change(commands, stands, mistyped=wrong))
        return True

    @checks_replies
    async def history(self, limit: int) -> Sequence[TenantChange]:
        """The last changes, the latest first."""
        return await last_logged(self._calls, self._names.tenants_history, TenantChange, limit)

    @checks_replies
    async def now_ms(self) -> int:
        """The store's time."""
        return await self._calls.now_ms()
