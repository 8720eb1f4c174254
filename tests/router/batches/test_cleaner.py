"""Files and batches that lie in storage, and that no record names, are removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dualmap.router.batches.cleaner import KEPT_S, Cleaner
from dualmap.router.batches.new_ids import new_batch_id, new_file_id
from dualmap.router.batches.storage import BatchStorage, file_name, part_name, plan_name
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.batches.batch_book import BatchBook, FileRecord
from dualmap.statestore.memory import MemoryStore
from tests.statestore.samples import HandClock

NO_CLOCK: Any = None


@pytest.fixture
def time() -> HandClock:
    return HandClock()


@pytest.fixture
def book(time: HandClock) -> BatchBook:
    return MemoryStore(SchedulingSettings(), now_ms=time).batches


@pytest.fixture
def storage(tmp_path: Path) -> BatchStorage:
    return BatchStorage(str(tmp_path))


def record(file_id: str) -> FileRecord:
    return FileRecord(file_id=file_id, tenant="", name="n", purpose="batch", size_bytes=1, created_s=1)


def files_in(folder: Path) -> set[str]:
    return {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()}


async def test_what_was_unnamed_for_long_is_removed_and_nothing_else(
    book: BatchBook, storage: BatchStorage, time: HandClock, tmp_path: Path
) -> None:
    kept, left, batch = new_file_id(), new_file_id(), new_batch_id()
    for name in (file_name(kept), file_name(left), plan_name(batch), part_name(batch, "p", failed=False), "files/own"):
        await storage.write(name, b"x")
    await book.put_file(record(kept))
    cleaner = Cleaner(storage, book, NO_CLOCK)

    assert await cleaner.clean() == 0
    time.advance(1000 * (KEPT_S - 1))
    assert await cleaner.clean() == 0
    new = new_file_id()
    await storage.write(file_name(new), b"x")
    time.advance(1000)
    assert await cleaner.clean() == 2

    assert files_in(tmp_path) == {file_name(kept), file_name(new), "files/own"}


async def test_files_whose_records_come_back_in_time_stay(
    book: BatchBook, storage: BatchStorage, time: HandClock
) -> None:
    file_id = new_file_id()
    await storage.write(file_name(file_id), b"x")
    cleaner = Cleaner(storage, book, NO_CLOCK)
    await cleaner.clean()
    time.advance(1000 * KEPT_S)
    await book.put_file(record(file_id))

    assert await cleaner.clean() == 0
    assert await storage.ids() == [file_id]


async def test_an_empty_storage_has_nothing_to_remove(book: BatchBook, storage: BatchStorage) -> None:
    assert await Cleaner(storage, book, NO_CLOCK).clean() == 0
