from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.router.tokens.prefix_cache import GRID_BYTES, Known, PrefixCache, Tokenized, prefix_grid


def keep(cache: PrefixCache, text: bytes, *ends: int, seed: int = 0) -> None:
    tokenized = Tokenized(tuple(range(100)))
    boundaries = [Known(end, end // 100, array("I"), tokenized) for end in ends]
    cache.add(prefix_grid(text, seed), text, None, boundaries)


def found_end(cache: PrefixCache, text: bytes, seed: int = 0) -> int | None:
    found = cache.find(prefix_grid(text, seed), text)
    return None if found is None else found.end


def text_of(length: int, fill: bytes = b"x") -> bytes:
    return bytes(fill * length)[:length]


def test_a_longer_text_starts_at_the_last_boundary() -> None:
    cache, text = PrefixCache(1 << 20), text_of(5 * GRID_BYTES + 300)
    keep(cache, text, 1000, 5 * GRID_BYTES + 200)
    assert found_end(cache, text + b"more") == 5 * GRID_BYTES + 200
    assert found_end(cache, text[: 5 * GRID_BYTES + 199]) == 1000
    assert found_end(cache, text[:1100]) == 1000
    assert found_end(cache, text[:900]) is None


def test_a_text_that_branches_off_starts_at_the_last_common_boundary() -> None:
    cache, text = PrefixCache(1 << 20), text_of(6 * GRID_BYTES)
    keep(cache, text, 1500, 3 * GRID_BYTES + 10, 5 * GRID_BYTES + 10)
    assert found_end(cache, text[: 4 * GRID_BYTES + 5] + b"other words" * 400) == 3 * GRID_BYTES + 10


def test_texts_of_another_seed_share_nothing() -> None:
    cache, text = PrefixCache(1 << 20), text_of(3 * GRID_BYTES)
    keep(cache, text, 2 * GRID_BYTES, seed=1)
    assert found_end(cache, text, seed=2) is None


def test_memory_is_bounded_and_the_least_recently_used_text_goes_first() -> None:
    one = PrefixCache(1 << 20)
    keep(one, text_of(3 * GRID_BYTES), 3 * GRID_BYTES - 1)
    cache = PrefixCache(3 * one.memory_bytes)
    texts = [text_of(3 * GRID_BYTES, bytes([letter])) for letter in b"abcd"]
    for text in texts[:3]:
        keep(cache, text, 3 * GRID_BYTES - 1)
    assert found_end(cache, texts[0]) is not None
    keep(cache, texts[3], 3 * GRID_BYTES - 1)
    assert [found_end(cache, text) is not None for text in texts] == [True, False, True, True]
    assert len(cache) == 3 and cache.memory_bytes <= 3 * one.memory_bytes


@settings(max_examples=60)
@given(st.data())
def test_what_is_found_is_a_true_prefix_of_the_text(data: st.DataObject) -> None:
    cache, kept = PrefixCache(1 << 20), set()
    pieces = st.lists(st.sampled_from([b"a" * 700, b"b" * 1900, b"c" * GRID_BYTES, b"d"]), min_size=1, max_size=8)
    for _ in range(data.draw(st.integers(1, 6))):
        text = b"".join(data.draw(pieces))
        ends = sorted(data.draw(st.sets(st.integers(1, len(text)), min_size=1, max_size=4)))
        keep(cache, text, *ends)
        kept |= {text[:end] for end in ends}
        found = found_end(cache, text)
        assert found is not None and found >= ends[-1] and text[:found] in kept
    probe = b"".join(data.draw(pieces))
    found = found_end(cache, probe)
    assert found is None or probe[:found] in kept
