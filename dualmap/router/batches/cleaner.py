"""Removes what lies in storage and no record names: what a replica that died had begun to write, or did not remove, and
all files once the store has lost its records.

Every replica may do it, and of all one does in each round. An entry goes once it has been unnamed for ``KEPT_S``, which
is longer than any upload takes, and is the time in which a store that lost its records can be given them back: the
notes of what is unnamed lie in the same store, so the time begins with the loss.
"""

from __future__ import annotations

import logging
from typing import Final

from dualmap.router.batches.storage import BatchStorage, file_name
from dualmap.runtime.clock import Clock
from dualmap.statestore.batches.batch_book import BatchBook
from dualmap.statestore.errors import StoreError

_log = logging.getLogger(__name__)

EVERY_S: Final = 3600
KEPT_S: Final = 3 * 86400
_LOOKED_EVERY_S: Final = 60.0


class Cleaner:
    """``run`` until cancelled."""

    def __init__(self, storage: BatchStorage, book: BatchBook, clock: Clock) -> None:
        self._storage = storage
        self._book = book
        self._clock = clock

    async def run(self) -> None:
        while True:
            try:
                if await self._book.begin_cleaning(EVERY_S):
                    await self.clean()
            except StoreError as error:
                _log.debug("storage is not cleaned: %s", error)
            except Exception:
                _log.exception("storage was not cleaned")
            await self._clock.sleep(_LOOKED_EVERY_S)

    async def clean(self) -> int:
        """Remove what has been unnamed for long enough; returns how many files and batches."""
        found = await self._storage.ids()
        since, now_s = await self._book.unnamed(found), await self._book.now_s()
        old = [each for each, since_s in since.items() if now_s - since_s >= KEPT_S]
        for each in old:
            if each.startswith("batch_"):
                await self._storage.remove_batch(each)
            else:
                await self._storage.remove([file_name(each)])
        if old:
            _log.warning("removed from storage what no record named: %d files and batches, as %s", len(old), old[0])
        return len(old)
