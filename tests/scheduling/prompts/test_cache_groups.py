"""The rules of hybrid models: where a hit ends, and what a prompt leaves."""

from __future__ import annotations

from dualmap.scheduling.prompts.cache_groups import CacheGroup, GroupKind, ends_left, last_end


def test_windows_and_states_need_their_last_blocks() -> None:
    needed = [CacheGroup(GroupKind.WINDOW, 32, window).needed_blocks for window in (1, 2, 33, 34, 128)]

    assert needed == [1, 1, 1, 2, 4]
    assert CacheGroup(GroupKind.STATE, 128).needed_blocks == 1


def test_a_hit_goes_back_to_the_last_hit_end() -> None:
    assert last_end([False, False, True, False, True, True, None], 9) == 4
    assert last_end([False, False, True, False, True, True, None], 3) == 2
    assert last_end([True, True], 9) == 0
    assert last_end([None, False], 9) == 0
    assert last_end([False, False], 1) == 2


def test_a_prompt_leaves_an_end_before_its_last_token_and_one_where_full_attention_held_more() -> None:
    assert ends_left(640, 32, 64, 4, 4) == (18,)
    assert ends_left(641, 32, 64, 4, 13) == (12, 20)
    assert ends_left(40, 32, 64, 0, 1) == ()
