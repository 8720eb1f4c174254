"""Runs grow, fork and are dropped; what a mark knows is the beginning of the list that it was found for."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.router.prompts import known_bodies
from dualmap.router.prompts.known_bodies import Counted, HashedText, KnownBodies, Listed, ListHashes, Mark, NewMark

GRID_BYTES = 100
BLOCK_BYTES = 8


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bodies, "GRID_BYTES", GRID_BYTES)


def hashed(text: bytes, before: int = 0) -> HashedText:
    """A prompt that is its list, with hashes that tell the text before each block's end."""
    ends = range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES)
    return HashedText(7, BLOCK_BYTES, tuple(hash(text[:end]) & (2**64 - 1) for end in ends), before, text[before:])


def keep(known: KnownBodies, items: Sequence[bytes], *, head: int = 1) -> Mark | None:
    """Read a list of items as a client's turn is, and keep what is learned; returns the mark where reading began."""
    text = b"".join(items)
    hashes = ListHashes(b"[" + text + b"]", 1, "tenant", "/path")
    start = next((mark for mark in known.find(hashes) if mark.end < len(text)), None)
    ends = [end for end in accumulate(map(len, items)) if start is None or end > start.end]
    kept = [end for place, end in enumerate(ends) if end == len(text) or place % 3 == 2]
    before = 0 if start is None else start.blocks * BLOCK_BYTES
    new = [NewMark(end, end, Counted(items=end)) for end in kept]
    if start is not None:
        known.use(start)
    known.keep(Listed(hashes, head, 1), start, new, hashed(text, before))
    return start


def found(known: KnownBodies, text: bytes) -> list[int]:
    """The places from which a list could be read on, the longest first."""
    marks = [*known.find(ListHashes(text, 0, "tenant", "/path"))]
    for mark in marks:
        whole = hashed(text[: mark.end])
        assert mark.known.size == mark.end == mark.counted.items
        assert tuple(mark.known.hashes[: mark.blocks]) == whole.hashes
        assert mark.rest == text[mark.blocks * BLOCK_BYTES : mark.end]
    return [mark.end for mark in marks]


ITEM = b"x" * 39


def items(*numbers: int) -> list[bytes]:
    return [b"%d" % (number % 10) + ITEM for number in numbers]


def test_a_list_that_grows_keeps_one_run_and_one_end() -> None:
    known = KnownBodies(1 << 20)
    for count in range(3, 30):
        start = keep(known, items(*range(count)))
        assert start is None if count == 3 else start is not None and start.end == 40 * (count - 1)
        assert len(known) == 1
    assert found(known, b"".join(items(*range(40))))[0] == 40 * 29
    assert known.memory_bytes < 20_000


def test_a_list_that_was_edited_is_known_up_to_a_mark_before_the_edit() -> None:
    known = KnownBodies(1 << 20)
    keep(known, items(*range(30)))
    edited = items(*range(20), 5, *range(21, 30))
    (first, *_) = found(known, b"".join(edited))
    assert 40 * 15 <= first <= 40 * 20
    keep(known, edited)
    assert len(known) == 2
    assert found(known, b"".join(items(*range(31))))[0] == found(known, b"".join([*edited, ITEM]))[0] == 40 * 30


def test_nothing_is_known_of_a_list_that_begins_otherwise_or_is_anothers() -> None:
    known = KnownBodies(1 << 20)
    keep(known, items(*range(30)))
    text = b"".join(items(*range(30)))
    assert found(known, text)
    assert not found(known, b"y" + text)
    for whose in (("other", "/path"), ("tenant", "/other"), ("", "/pathtenant")):
        assert not [*known.find(ListHashes(text, 0, *whose))]


def test_the_run_that_was_used_least_recently_is_dropped_and_its_points_with_it() -> None:
    known = KnownBodies(70_000)
    conversations = [[b"%05d" % number, *items(*range(20))] for number in range(50)]
    for number, each in enumerate(conversations):
        keep(known, each)
        assert keep(known, [*conversations[0], *items(*range(number + 1))]) is not None
    assert known.memory_bytes <= 70_000
    assert 3 <= len(known) < 20
    assert found(known, b"".join(conversations[-1]))
    assert not found(known, b"".join(conversations[1]))
    points = known._points
    for mark in [*known.find(ListHashes(b"".join(conversations[0]), 0, "tenant", "/path"))]:
        known.forget(mark.run)
    assert not found(known, b"".join(conversations[0]))
    held = {id(mark.run) for point in points.values() for mark in (point.mark, *point.tails) if mark is not None}
    assert len(held) <= len(known)


def test_a_run_that_is_too_large_is_not_kept() -> None:
    known = KnownBodies(1000)
    keep(known, items(*range(50)))
    assert (len(known), known.memory_bytes) == (0, 0)


def test_what_is_shorter_than_a_block_has_no_mark() -> None:
    known = KnownBodies(1 << 20)
    keep(known, [b"ab", b"cd"])
    assert len(known) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 9)), max_size=12), st.integers(0, 99))
def test_whatever_was_kept_a_mark_knows_the_list_that_it_was_found_for(
    steps: list[tuple[int, int, int]], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_bodies, "GRID_BYTES", GRID_BYTES)
        rng = random.Random(seed)
        known, conversations = KnownBodies(30_000), [[b"begin", b"again"]]
        for place, cut, more in steps:
            base = conversations[place % len(conversations)]
            grown = [
                *(base[: len(base) - cut] or base),
                *(rng.randbytes(rng.choice([3, 40, 150])) for _ in range(more)),
            ]
            conversations.append(grown)
            found(known, b"".join(grown))
            keep(known, grown)
        for each in conversations:
            found(known, b"".join(each))
        counted = sum(run.memory_bytes for run, _ in known._used.values())
        assert known.memory_bytes == sum(size for _, size in known._used.values())
        assert counted <= known.memory_bytes + 10_000
        assert isinstance(next(iter(known._used.values()))[0].hashes, array) if len(known) else True
