"""Values kept up to a number of bytes."""

from __future__ import annotations

from dualmap.router.kept import Kept


def test_what_was_used_least_recently_goes_first() -> None:
    kept: Kept[str, int] = Kept(max_bytes=10)
    for name, value in (("a", 1), ("b", 2)):
        kept.keep(name, value, 5)
    assert kept.get("a") == 1
    kept.keep("c", 3, 5)
    assert (kept.get("a"), kept.get("b"), kept.get("c"), kept.memory_bytes, len(kept)) == (1, None, 3, 10, 2)


def test_a_value_that_is_replaced_counts_once_and_one_beyond_the_bound_is_not_kept() -> None:
    kept: Kept[str, int] = Kept(max_bytes=10)
    kept.keep("a", 1, 8)
    kept.keep("a", 2, 6)
    assert (kept.get("a"), kept.memory_bytes) == (2, 6)
    kept.keep("b", 3, 11)
    assert (kept.get("a"), kept.get("b"), kept.memory_bytes) == (None, None, 0)
