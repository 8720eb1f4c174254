"""The book of files and batches, on every store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.batches.batch import Batch, RangeDone, Status
from dualmap.statestore.batches import batch_book
from dualmap.statestore.batches.batch_book import END, REPORTED_FOR_MS, BatchBook, Claim, FileRecord
from dualmap.statestore.connect import Store
from tests.statestore.samples import HandClock
from tests.support.batches import NEW_BATCH as NEW

RUNNING = replace(NEW.entered(Status.IN_PROGRESS, 110), lines=100)
LEASE_MS = 5000


@pytest.fixture
def book(store: Store) -> BatchBook:
    return store.batches


@pytest.fixture
async def running(book: BatchBook) -> Batch:
    await book.create(NEW)
    assert await book.change(NEW, RUNNING)
    return RUNNING


async def claimed(book: BatchBook, batch: Batch, task: str, owner: str = "one") -> Claim:
    claim = await book.claim(batch, task, owner, LEASE_MS)
    assert claim is not None
    return claim


def file(name: str, tenant: str = "acme", created_s: int = 1) -> FileRecord:
    return FileRecord(file_id=name, tenant=tenant, name="n", purpose="batch", size_bytes=7, created_s=created_s)


async def test_files_are_those_of_a_tenant_the_latest_first(book: BatchBook) -> None:
    for each in (file("file-1"), file("file-2", created_s=2), file("file-3", tenant="other")):
        await book.put_file(each)

    assert await book.files("acme") == [file("file-2", created_s=2), file("file-1")]
    assert await book.file("acme", "file-3") is None
    assert await book.file("other", "file-3") == file("file-3", tenant="other")
    assert await book.remove_file("acme", "file-1")
    assert not await book.remove_file("acme", "file-1")
    assert await book.file("acme", "file-1") is None


async def test_of_batches_that_are_over_those_are_remembered_that_were_made_last(
    book: BatchBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def made(number: int, *, is_over: bool = True) -> None:
        batch = replace(NEW, batch_id=f"batch_{number}", created_s=100 + number)
        await book.create(batch)
        if is_over:
            assert await book.change(batch, batch.entered(Status.CANCELLED, 200))

    async def names() -> list[str]:
        return [each.batch_id for each in await book.batches("acme")]

    monkeypatch.setattr(batch_book, "KEPT_OVER", 2)
    await made(0, is_over=False)
    for number in range(1, 5):
        await made(number)
    assert await names() == ["batch_4", "batch_3", "batch_2", "batch_0"]

    monkeypatch.setattr(batch_book, "KEPT_BYTES", 10)
    await made(5, is_over=False)
    assert await names() == ["batch_5", "batch_0"]


async def test_a_batch_is_open_until_it_is_over_and_nothing_is_left_of_its_tasks(book: BatchBook) -> None:
    await book.create(NEW)
    assert await book.open() == {"batch_1": "acme"}
    assert await book.change(NEW, RUNNING)
    assert await book.finish_range(RUNNING, await claimed(book, RUNNING, "0"), RangeDone("p", 16, 0))
    await claimed(book, RUNNING, END)
    finalizing = RUNNING.entered(Status.FINALIZING, 120)
    assert await book.change(RUNNING, finalizing)

    over = finalizing.entered(Status.COMPLETED, 130)
    assert await book.change(finalizing, over, [file("file-9")])

    assert await book.open() == {}
    assert await book.batch("acme", "batch_1") == over
    assert await book.batches("acme") == [over]
    assert await book.batch("other", "batch_1") is None
    assert (await book.progress(over)).done == {}
    assert await book.claims(over) == frozenset()
    assert await book.file("acme", "file-9") == file("file-9")


async def test_of_two_changes_of_one_state_one_is_made(book: BatchBook, running: Batch) -> None:
    assert await book.change(running, running.cancelled(120))
    assert not await book.change(running, running.entered(Status.FINALIZING, 120))
    assert (await book.batch("acme", "batch_1")) == running.cancelled(120)


async def test_a_task_is_of_one_replica_until_its_lease_ends(book: BatchBook, running: Batch, clock: HandClock) -> None:
    first = await claimed(book, running, "3", "one")
    assert await book.claim(running, "3", "two", LEASE_MS) is None
    assert await book.claims(running) == {"3"}

    clock.advance(LEASE_MS - 1)
    assert await book.renew(first, LEASE_MS)
    clock.advance(LEASE_MS - 1)
    assert await book.claim(running, "3", "two", LEASE_MS) is None
    clock.advance(2)

    assert await book.claims(running) == frozenset()
    second = await claimed(book, running, "3", "two")
    assert second.token != first.token
    assert not await book.renew(first, LEASE_MS)
    await book.give_back(first)
    assert await book.claims(running) == {"3"}, "what another one has is not given back"
    await book.give_back(second)
    assert await book.claims(running) == frozenset()


async def test_a_range_counts_once_whoever_reports_it_late(book: BatchBook, running: Batch, clock: HandClock) -> None:
    late = await claimed(book, running, "0", "one")
    clock.advance(LEASE_MS + 1)
    claim = await claimed(book, running, "0", "two")

    assert not await book.finish_range(running, late, RangeDone("late", 16, 0))
    assert await book.finish_range(running, claim, RangeDone("good", 15, 1))
    assert not await book.finish_range(running, claim, RangeDone("twice", 16, 0))

    progress = await book.progress(running)
    assert progress.done == {0: RangeDone("good", 15, 1)}
    assert await book.claims(running) == frozenset()


async def test_a_range_counts_also_where_its_lease_is_renewed_at_that_moment(book: BatchBook, running: Batch) -> None:
    claim = await claimed(book, running, "0")
    assert await book.renew(claim, LEASE_MS)

    assert await book.finish_range(running, claim, RangeDone("p", 16, 0))
    assert not await book.renew(claim, LEASE_MS)
    assert await book.claims(running) == frozenset()


async def test_nothing_is_added_to_a_batch_that_is_ending(book: BatchBook, running: Batch) -> None:
    claim = await claimed(book, running, "0")
    assert await book.change(running, running.entered(Status.FINALIZING, 120))

    assert not await book.finish_range(running, claim, RangeDone("p", 16, 0))
    assert await book.claim(running, "1", "one", LEASE_MS) is None


async def test_what_was_under_way_counts_in_a_batch_that_is_cancelled(book: BatchBook, running: Batch) -> None:
    claim = await claimed(book, running, "0")
    assert await book.change(running, running.cancelled(120))

    assert await book.finish_range(running, claim, RangeDone("p", 3, 0))
    assert await book.claim(running, "1", "one", LEASE_MS) is None


async def test_a_range_that_is_done_is_not_claimed_again(book: BatchBook, running: Batch) -> None:
    assert await book.finish_range(running, await claimed(book, running, "0"), RangeDone("p", 16, 0))

    assert await book.claim(running, "0", "one", LEASE_MS) is None
    assert await book.ranges_done(running) == 1
    assert await book.done(running) == {0}


async def test_replicas_know_the_lines_of_each_other_for_a_while(book: BatchBook, clock: HandClock) -> None:
    assert await book.exchange_lines("one", {"p/a": 3, "p/b": 1}) == {}
    assert await book.exchange_lines("two", {"p/a": 2}) == {"p/a": 3, "p/b": 1}
    assert await book.exchange_lines("one", {}) == {"p/a": 2}
    assert await book.exchange_lines("three", {}) == {"p/a": 2}

    clock.advance(REPORTED_FOR_MS + 1)

    assert await book.exchange_lines("three", {}) == {}


async def test_what_no_record_names_is_known_since_it_was_first_found(
    book: BatchBook, running: Batch, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await book.put_file(file("file-1"))
    await book.put_file(file("file-2", tenant=""))
    found = ["file-1", "file-2", "file-3", running.batch_id, "batch_0"]
    first = await book.unnamed(found)
    assert first == {"file-3": clock.now_ms // 1000, "batch_0": clock.now_ms // 1000}

    clock.advance(60_000)
    await book.remove_file("acme", "file-1")
    assert await book.unnamed(found) == {**first, "file-1": clock.now_ms // 1000}

    # one that got a record, and those that are not there any more, are forgotten
    await book.put_file(file("file-3"))
    assert await book.unnamed(["file-3"]) == {}
    await book.remove_file("acme", "file-3")
    clock.advance(60_000)
    assert await book.unnamed(["file-3", "batch_0"]) == dict.fromkeys(("batch_0", "file-3"), clock.now_ms // 1000)

    monkeypatch.setattr(batch_book, "MOST_UNNAMED", 2)
    assert len(await book.unnamed(f"file-{number}" for number in range(10, 20))) == 2


async def test_in_each_round_one_replica_looks_for_what_is_unnamed(book: BatchBook, clock: HandClock) -> None:
    assert await book.begin_cleaning(60)
    assert not await book.begin_cleaning(60)
    await book.unnamed([])  # which keeps the time of the next round
    clock.advance(59_000)
    assert not await book.begin_cleaning(60)
    clock.advance(1_000)
    assert await book.begin_cleaning(60)
    assert await book.unnamed([]) == {}


async def test_the_files_of_a_batch_that_ends_are_named(book: BatchBook, running: Batch) -> None:
    ending = running.entered(Status.FINALIZING, 120)
    assert await book.change(running, ending)
    over = replace(ending.entered(Status.COMPLETED, 130), output_file="file-9")
    assert await book.change(ending, over, [file("file-9")])

    assert set(await book.unnamed(["file-9", "file-8", running.batch_id])) == {"file-8", running.batch_id}
