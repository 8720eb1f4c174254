from __future__ import annotations

import pytest

from dualmap.scheduling.estimates.adapters import adapter_disk_s, adapter_host_s, load_share, slot_turns
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec

ROOM = InstanceSpec("a", "http://a", adapter_slots=2, adapter_host_slots=4, adapter_host_ms=20, adapter_disk_ms=500)


@pytest.mark.parametrize(
    ("place", "host_s", "disk_s"),
    [(0, 0.0, 0.0), (1, 0.0, 0.0), (2, 0.02, 0.0), (3, 0.02, 0.0), (4, 0.02, 0.5), (9, 0.02, 0.5)],
)
def test_the_place_of_an_adapter_says_how_long_its_loads_take(place: int, host_s: float, disk_s: float) -> None:
    assert (adapter_host_s(ROOM, place, 1.0), adapter_disk_s(ROOM, place, 1.0)) == (host_s, disk_s)
    assert (adapter_host_s(ROOM, place, 4.0), adapter_disk_s(ROOM, place, 4.0)) == (4 * host_s, 4 * disk_s)


@pytest.mark.parametrize(("rank", "share"), [(0, 1.0), (16, 1.0), (64, 4.0), (8, 0.5), (1, 0.25)])
def test_a_load_takes_longer_the_higher_the_rank(rank: int, share: float) -> None:
    assert load_share(rank) == share


@pytest.mark.parametrize(("running", "answers"), [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (5, 2.0)])
def test_each_of_two_slots_becomes_free_once_in_the_time_of_an_answer(running: int, answers: float) -> None:
    assert slot_turns(ROOM, running, running) == answers


def test_a_slot_is_free_later_where_an_adapter_has_several_requests() -> None:
    assert slot_turns(ROOM, 3, 6) == 2 * slot_turns(ROOM, 3, 3)
    assert slot_turns(ROOM, 3, 0) == slot_turns(ROOM, 3, 3), "what runs there is not known yet"


PROMPT = Chain((11, 12, 13), 100, 300, root=7)


def test_the_key_of_a_request_for_an_adapter_is_the_adapter() -> None:
    assert HotnessTree().key(PROMPT) == 7
    assert PROMPT.key_hashes == (7, 11, 12, 13)


@pytest.mark.parametrize(("hot", "key", "hot_tokens"), [((7,), 11, 0), ((7, 11), 12, 100), ((7, 11, 12), 13, 200)])
def test_the_key_for_a_hot_adapter_takes_in_the_prefix(hot: tuple[int, ...], key: int, hot_tokens: int) -> None:
    tree = HotnessTree({prefix: depth for depth, prefix in enumerate(hot, 1)})

    assert tree.key(PROMPT) == key
    assert tree.hot_tokens(PROMPT) == hot_tokens


def test_a_hot_adapter_takes_in_the_rest_of_a_short_prompt() -> None:
    prompt = Chain((11,), 100, 150, tail_hash=19, root=7)
    tree = HotnessTree({7: 1, 11: 2})

    assert tree.key(prompt) == 19


def test_key_blocks_of_several_blocks_follow_the_root() -> None:
    prompt = Chain((11, 12, 13, 14), 16, 64, key_stride=2, root=7)

    assert prompt.key_hashes == (7, 12, 14)
    assert [prompt.prefix_hash(blocks) for blocks in (1, 2, 3)] == [7, 12, 14]
