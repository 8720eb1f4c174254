"""KV memory of a hybrid model: what a prompt finds, and what it leaves."""

from __future__ import annotations

import pytest

from dualmap.scheduling.prompts.cache_groups import CacheGroup, GroupKind
from dualmap.simulation.engine.hybrid_kv_pool import HybridKvPool, groups_from, named, parts_of
from dualmap.simulation.engine.kv_pool import CacheChange, Journal

WINDOW, STATE = CacheGroup(GroupKind.WINDOW, 4, 9), CacheGroup(GroupKind.STATE, 8)
PROMPT = tuple(range(1, 21))


def serve(pool: HybridKvPool, hashes: tuple[int, ...], prompt_tokens: int) -> int:
    """Compute a prompt alone; its hit in blocks."""
    hits, _ = pool.match(hashes, (prompt_tokens - 1) // 4)
    pool.hold_hits(hashes[:hits])
    pool.hold(hashes[hits:])
    pool.drop(hashes)
    return hits


def test_the_next_turn_finds_the_prompt_before_up_to_its_last_step() -> None:
    pool = HybridKvPool(100, 4, [WINDOW, STATE])

    hits = [serve(pool, PROMPT[:blocks], 4 * blocks + 2) for blocks in (7, 7, 13, 20)]

    assert hits == [0, 6, 6, 12]


def test_the_first_prompt_that_shares_a_part_finds_nothing_and_leaves_an_end_there() -> None:
    pool = HybridKvPool(100, 4, [WINDOW, STATE])
    other, third = (*PROMPT[:9], *range(50, 58)), (*PROMPT[:9], *range(60, 68))

    hits = [serve(pool, hashes, 4 * len(hashes)) for hashes in (PROMPT, other, third)]

    assert hits == [0, 0, 8]


def test_blocks_of_all_groups_share_the_memory_and_are_evicted() -> None:
    journal: Journal = []
    pool = HybridKvPool(24, 4, [STATE], journal)
    serve(pool, PROMPT, 81)
    kept = named(0, PROMPT[19])
    assert (CacheChange.STORED, kept) in journal and pool.cached_blocks == 21
    serve(pool, tuple(range(30, 40)), 41)

    assert pool.cached_blocks == pool.total_blocks
    assert (CacheChange.REMOVED, kept) in journal
    assert serve(pool, PROMPT, 81) == 0


def test_where_running_requests_hold_all_memory_no_end_is_left() -> None:
    pool = HybridKvPool(20, 4, [STATE])

    assert [serve(pool, PROMPT, 81), pool.cached_blocks] == [0, 20]
    assert serve(pool, PROMPT, 81) == 0


def test_blocks_of_groups_have_names_of_their_own() -> None:
    assert parts_of(named(3, 2**64 - 1)) == (3, 2**64 - 1)
    assert named(0, 0) < 0


def test_groups_are_described_in_words() -> None:
    groups = groups_from(["window:128", "state", "window:96:64", "state:128"], 32)

    assert groups == (
        CacheGroup(GroupKind.WINDOW, 32, 128),
        CacheGroup(GroupKind.STATE, 32),
        CacheGroup(GroupKind.WINDOW, 64, 96),
        CacheGroup(GroupKind.STATE, 128),
    )


@pytest.mark.parametrize("described", ["full", "window", "window:0", "state:40", "state:0", "window:9:32:1", "state:x"])
def test_other_descriptions_are_refused(described: str) -> None:
    with pytest.raises(ValueError, match="cache group"):
        groups_from([described], 32)
