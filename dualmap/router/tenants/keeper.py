"""The keeper of a replica's copy of the tenants that were made in the running fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from dualmap.router.tenants.directory import TenantDirectory
from dualmap.router.tenants.tenant_record import KeyRecord, TenantRecord
from dualmap.runtime.clock import Clock
from dualmap.scheduling.backoff import worth_logging
from dualmap.statestore.errors import StoreError, StoreUnavailableError
from dualmap.statestore.tenants.tenant_book import Edition, TenantBook, TenantNews

log = logging.getLogger(__name__)

POLL_S = 0.4
"""Interval at which the edition of the book is read: a change is in force everywhere within this time and a call."""
TIME_READ_S = 60.0
"""Interval at which the store's time is read: keys end, and tokens expire, by it."""
ENTERED_TOGETHER = 20
"""Tenants that are entered between two breaths of the event loop."""
PUT_BACK_TOGETHER = 100
"""Tenants that are put back in one call."""
MAX_TRIES = 8
"""Tries to put back what the store lost, while other replicas do so too."""
REMEMBERED_REMOVALS = 10_000


class TenantKeeper:
    """Holds the directory to the book, of which it reads what has changed.

    While the store is away, the last known tenants stay in force. A store that comes back empty, or as it was some time
    ago, is given again what it lost, and what was removed is removed again, by whichever replica notices it first: so
    no key that was revoked gives access any more, and no other key stops to.
    """

    def __init__(
        self,
        book: TenantBook,
        directory: TenantDirectory,
        clock: Clock,
        *,
        replica_id: str,
        changed: Callable[[], None],
    ) -> None:
        """``changed`` is called when keys may have ended; it must not wait."""
        self.book = book
        self.directory = directory
        self.records: dict[str, TenantRecord] = {}
        self.edition: Edition | None = None
        """The edition that ``records`` are of; None: never read."""
        self._clock = clock
        self._replica_id = replica_id
        self._changed = changed
        self._reading = asyncio.Lock()
        self._removed: dict[str, int] = {}
        """The editions in which tenants were removed, as far as seen."""
        self._kept_out: set[str] = set()
        """Tenants with a key that another one had before them, and may have given up since."""
        self._ending: set[str] = set()
        """Tenants with keys that end by themselves."""
        self._store_ahead_ms = 0.0
        """The store's clock less this process's monotonic one."""
        self._read_time_s = float("-inf")
        self._failures = 0

    async def run(self) -> None:
        """Follow the book. Runs until cancelled."""
        while True:
            await self._clock.sleep(POLL_S)
            try:
                await self.refresh()
                self._failures = 0
            except StoreError as error:
                self._failures += 1
                if worth_logging(self._failures):
                    log.warning("the tenants last known stay in force: %s", error)
            self._end_keys()

    async def refresh(self) -> None:
        """Bring the directory up to date with the book.

        Raises:
            StoreError: the book cannot be read; the directory stays as it is.
        """
        async with self._reading:
            if self._clock.monotonic_s() - self._read_time_s > TIME_READ_S:
                await self._read_time()
                await self.book.mend(self.edition, len(self.records))
            news = await self._news()
            if news.edition == self.edition:
                return
            if news.lost:
                news = await self._put_back(news)
            elif news.whole and news.edition.number < max(map(_revision, news.texts.values()), default=0):
                news = await self._renumbered(news)
            await self._enter(news)

    async def _news(self) -> TenantNews:
        """The news of the book, which is mended first where it cannot be read."""
        try:
            return await self.book.news(self.edition)
        except StoreUnavailableError:
            raise
        except StoreError:
            if not await self.book.mend():
                raise
        return await self.book.news(self.edition)

    async def _renumbered(self, news: TenantNews) -> TenantNews:
        """Enter an edition beyond all that tenants were changed in, where the book was mended: what is changed later
        must have a higher number than what was before."""
        beyond = max(map(_revision, news.texts.values()))
        by = f"replica {self._replica_id}"
        await self.book.change(news.edition, {}, by=by, action="mended", before={}, after={}, beyond=beyond)
        return await self.book.news(None)

    async def _enter(self, news: TenantNews) -> None:
        removed = [name for name, text in news.texts.items() if text is None]
        if news.whole:
            removed += self.records.keys() - news.texts.keys()
        for name in removed:
            self._remove(name, news.edition.number)
        changed = {name: text for name, text in news.texts.items() if text is not None}
        for count, (name, text) in enumerate(changed.items()):
            self._put(name, text)
            if count % ENTERED_TOGETHER == ENTERED_TOGETHER - 1:
                await asyncio.sleep(0)  # requests go on
        self._let_in()
        if self._ending:
            await self._read_time()
        if news.edition.number:
            self.directory.close()
        self.edition = news.edition
        self._changed()

    def _let_in(self) -> None:
        """Give tenants the keys that others had before them: these may have changed with them, or later."""
        for name in tuple(self._kept_out):
            if self.directory.put(name, self.records[name], self.is_valid):
                self._kept_out.discard(name)

    def _put(self, name: str, text: bytes) -> None:
        try:
            record = TenantRecord.parse(text)
        except ValueError:
            log.warning("tenant %r cannot be read as the store has it, and is refused: set it again", name)
            self._remove(name, 0)
            return
        if name in self.directory.configured and name not in self.records:
            log.warning("tenant %s is in the settings and in the store: the settings count", name)
        self.records[name] = record
        self._removed.pop(name, None)
        self._ending.discard(name)
        if any(key.expires_ms is not None for key in record.keys):
            self._ending.add(name)
        if self.directory.put(name, record, self.is_valid):
            self._kept_out.discard(name)
        else:
            self._kept_out.add(name)

    def _remove(self, name: str, edition: int) -> None:
        self.records.pop(name, None)
        self._kept_out.discard(name)
        self._ending.discard(name)
        self.directory.remove(name)
        self._removed[name] = edition
        while len(self._removed) > REMEMBERED_REMOVALS:
            del self._removed[next(iter(self._removed))]

    # keys that end by themselves ---------------------------------------------------------------------------------
    def is_valid(self, key: KeyRecord) -> bool:
        """Whether a key has not ended, by the store's clock."""
        return key.expires_ms is None or key.expires_ms > self.now_ms()

    async def _read_time(self) -> None:
        self._store_ahead_ms = await self.book.now_ms() - self._clock.monotonic_s() * 1000
        self._read_time_s = self._clock.monotonic_s()

    def now_ms(self) -> float:
        """The store's time, as far as it is known."""
        return self._clock.monotonic_s() * 1000 + self._store_ahead_ms

    def _end_keys(self) -> None:
        for name in tuple(self._ending):
            record = self.records[name]
            if not all(map(self.is_valid, record.keys)):
                self.directory.put(name, record, self.is_valid)
                self._let_in()
                self._changed()
                if not any(key.expires_ms is not None and self.is_valid(key) for key in record.keys):
                    self._ending.discard(name)

    # a store that lost something ---------------------------------------------------------------------------------
    async def _put_back(self, news: TenantNews) -> TenantNews:
        """Enter what the book lost; what is newer there stays. Returns the book as it is then."""
        known = self.edition
        assert known is not None
        for _ in range(MAX_TRIES):
            lost = self._lost(news.texts)
            if not lost and news.edition.number >= known.number:
                return news
            await self._enter_again(news.edition, lost, beyond=known.number)
            news = await self.book.news(None)
        raise StoreError("the store lost tenants, and others change them again and again")

    async def _enter_again(self, edition: Edition, lost: Mapping[str, bytes | None], *, beyond: int) -> None:
        names, by = [*lost], f"replica {self._replica_id}"
        for first in range(0, max(1, len(names)), PUT_BACK_TOGETHER):
            some = {name: lost[name] for name in names[first : first + PUT_BACK_TOGETHER]}
            made = await self.book.change(edition, some, by=by, action="put back", before={}, after={}, beyond=beyond)
            if made is None:
                return  # another replica does so, too, or somebody changes tenants
            edition = made
        if names:
            log.warning("the store had lost changes of tenants, which were put back: tenants=%d", len(names))

    def _lost(self, texts: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
        """The tenants that are newer here than in the book; those that were removed have no text."""
        lost: dict[str, bytes | None] = {}
        for name, record in self.records.items():
            if _revision(texts.get(name)) < record.revision:
                lost[name] = record.text()
        for name, edition in self._removed.items():
            text = texts.get(name)
            if text is not None and _revision(text) < edition:
                lost[name] = None
        return lost


def _revision(text: bytes | None) -> int:
    if text is None:
        return -1
    try:
        return TenantRecord.parse(text).revision
    except ValueError:
        return -1
