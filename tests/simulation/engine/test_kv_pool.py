"""Where blocks are."""

from __future__ import annotations

from dualmap.simulation.engine.kv_pool import KvPool


def test_a_match_ends_at_the_first_missing_block() -> None:
    pool = KvPool(10)
    pool.hold((1, 2, 4))
    pool.drop((4,))
    assert pool.match((1, 2, 3, 4), 4) == (2, 0)
    assert pool.match((1, 2, 4), 3) == (3, 1)
    assert pool.match((1, 2, 4), 2) == (2, 0)


def test_a_block_is_idle_only_when_its_last_holder_is_gone() -> None:
    pool = KvPool(10)
    pool.hold((1, 2))
    pool.hold((1,))
    pool.drop((1, 2))
    assert (pool.used_blocks, pool.cached_blocks, pool.available_blocks) == (1, 2, 9)
    pool.drop((1,))
    assert (pool.used_blocks, pool.cached_blocks, pool.empty_blocks) == (0, 2, 8)


def test_idle_blocks_give_way_oldest_and_deepest_first() -> None:
    pool = KvPool(4)
    pool.hold((1, 2))
    pool.hold((3, 4))
    pool.drop((1, 2))
    pool.drop((3, 4))
    pool.take_private(3)
    assert [pool.match((block,), 1)[0] for block in (1, 2, 3, 4)] == [0, 0, 1, 0]
    pool.give_private(3)
    assert pool.empty_blocks == 3


def test_a_used_block_moves_behind_those_that_were_not() -> None:
    pool = KvPool(2)
    pool.hold((1,))
    pool.drop((1,))
    pool.hold((2,))
    pool.drop((2,))
    pool.hold((1,))
    pool.drop((1,))
    pool.take_private(1)
    assert [pool.match((block,), 1)[0] for block in (1, 2)] == [1, 0]
