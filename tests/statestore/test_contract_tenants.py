"""The book of tenants, on every store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dualmap.statestore.connect import Store
from dualmap.statestore.tenants import tenant_book
from dualmap.statestore.tenants.allotment_ledger import LedgerEntry
from dualmap.statestore.tenants.tenant_book import Edition, TenantBook
from tests.statestore.samples import HandClock


@pytest.fixture
def book(store: Store) -> TenantBook:
    return store.tenants


async def entered(book: TenantBook, known: Edition, texts: Mapping[str, bytes | None], **about: Any) -> Edition:
    about = {"by": "ada", "action": "set", "before": {}, "after": {}} | about
    edition = await book.change(known, texts, **about)
    assert edition is not None
    return edition


async def test_who_knows_an_edition_reads_only_what_changed_since(book: TenantBook) -> None:
    first = await entered(book, Edition(), {"acme": b"1"})
    second = await entered(book, first, {"other": b"2"})
    third = await entered(book, second, {"acme": None})

    whole = await book.news(None)
    assert (whole.edition, whole.texts, whole.whole, whole.lost) == (third, {"other": b"2"}, True, False)
    since = await book.news(first)
    assert (since.edition, since.texts, since.whole) == (third, {"acme": None, "other": b"2"}, False)
    assert (await book.news(third)).texts == {}
    assert (await book.news(Edition())).texts == {"acme": None, "other": b"2"}


async def test_of_two_changes_of_one_edition_one_is_made(book: TenantBook) -> None:
    first = await entered(book, Edition(), {"acme": b"1"})
    await entered(book, first, {"acme": b"2"})

    assert await book.change(first, {"acme": b"3"}, by="bob", action="set", before={}, after={}) is None
    assert (await book.news(None)).texts == {"acme": b"2"}
    assert len(await book.history(10)) == 2


async def test_the_log_says_who_changed_what_and_when(book: TenantBook, clock: HandClock) -> None:
    clock.advance(1500)
    await entered(book, Edition(), {"acme": b"1"}, by="ada", action="create", before={}, after={"weight": 2.0})

    (change,) = await book.history(5)
    assert (change.at_ms, change.by, change.action, list(change.tenants)) == (clock(), "ada", "create", ["acme"])
    assert change.after == {"weight": 2.0}


async def test_a_log_that_was_cut_off_gives_the_whole_book_and_nothing_counts_as_lost(
    book: TenantBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_book, "LOGGED_CHANGES", 2)
    first = edition = await entered(book, Edition(), {"acme": b"1"})
    for text in (b"2", b"3", b"4"):
        edition = await entered(book, edition, {"acme": text})

    news = await book.news(first)
    assert (news.edition, news.texts, news.whole, news.lost) == (edition, {"acme": b"4"}, True, False)
    assert len(await book.history(10)) == 2


async def test_a_book_that_is_empty_or_went_another_way_has_lost_what_was_known(book: TenantBook) -> None:
    known = Edition(2, "of an earlier store")
    empty = await book.news(known)
    assert (empty.edition, empty.lost, empty.whole) == (Edition(), True, True)

    edition = await entered(book, Edition(), {"acme": b"1"})
    for text in (b"2", b"3", b"4"):
        edition = await entered(book, edition, {"acme": text})
    other_way = await book.news(known)
    assert (other_way.edition, other_way.texts, other_way.lost) == (edition, {"acme": b"4"}, True)


async def test_an_edition_that_puts_something_back_is_beyond_all_that_were_known(book: TenantBook) -> None:
    edition = await entered(book, Edition(), {"acme": b"1"}, beyond=7)

    assert edition.number == 8
    assert (await book.news(Edition())).texts == {"acme": b"1"}
    assert (await book.news(Edition(7, "known"))).lost


async def test_tenants_are_read_in_parts(book: TenantBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_book, "READ_TOGETHER", 3)
    texts = {f"tenant-{number}": b"%d" % number for number in range(10)}
    await entered(book, Edition(), texts)

    assert (await book.news(None)).texts == texts


async def test_the_division_of_budgets_that_nobody_has_any_more_is_forgotten_in_the_same_step(
    store: Store, book: TenantBook
) -> None:
    first = await entered(book, Edition(), {"acme": b"1"})
    for budget in ("acme/tokens/day", "acme/tokens/minute", "other/tokens/day"):
        await store.allotments.enter(budget, LedgerEntry(), LedgerEntry(1, 80, {"a": 40, "b": 40}))

    await entered(book, first, {"acme": None}, gone=("acme/tokens/day", "acme/tokens/minute"))
    assert await book.change(first, {}, by="bob", action="set", before={}, after={}, gone=("other/tokens/day",)) is None

    _, left = await store.allotments.scan(0)
    assert left.keys() == {"other/tokens/day"}
