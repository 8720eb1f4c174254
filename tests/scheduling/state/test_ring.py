from __future__ import annotations

from array import array
from collections import Counter
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.state.ring import RING_SEEDS, DualRing, Ring

ids = st.text(alphabet="abcdef0123456789-", min_size=1, max_size=6)
memberships = st.frozensets(ids, max_size=8)
keys = st.integers(0, 2**64 - 1)


def instances(count: int) -> list[str]:
    return [f"instance-{number}" for number in range(count)]


def test_the_mapping_is_the_same_in_every_process_and_version() -> None:
    rings = DualRing.of(instances(4), 128)

    assert [rings.pair(key) for key in (0, 1, 2**63, 2**64 - 1)] == [
        ("instance-3", "instance-0"),
        ("instance-2", "instance-0"),
        ("instance-1", "instance-3"),
        ("instance-0", "instance-1"),
    ]


@given(memberships, keys)
def test_a_pair_is_two_distinct_members_as_soon_as_there_are_two(members: frozenset[str], key: int) -> None:
    pair = DualRing.of(members, 4).pair(key)

    assert len(pair) == len(set(pair)) == min(2, len(members))
    assert set(pair) <= members


@given(st.lists(memberships, min_size=1, max_size=5))
def test_rings_depend_on_the_members_and_not_on_how_they_came_about(history: list[frozenset[str]]) -> None:
    rings = DualRing.of((), 4)
    for members in history:
        rings = rings.with_members(members)

    assert rings == DualRing.of(history[-1], 4)


@given(memberships, ids, st.lists(keys, min_size=1, max_size=50))
def test_one_more_instance_only_takes_keys_to_itself(members: frozenset[str], newcomer: str, some: list[int]) -> None:
    before = DualRing.of(members - {newcomer}, 8)
    after = before.with_members([*before.members, newcomer])

    for ring, grown in ((before.first, after.first), (before.second, after.second)):
        for key in some if before.members else []:
            assert grown.successor(key) in (ring.successor(key), newcomer)


@given(memberships.filter(bool), st.lists(keys, min_size=1, max_size=50))
def test_one_instance_less_only_moves_its_own_keys(members: frozenset[str], some: list[int]) -> None:
    leaving = min(members)
    before = DualRing.of(members, 8)
    after = before.with_members(members - {leaving})

    for ring, shrunk in ((before.first, after.first), (before.second, after.second)):
        for key in some if after.members else []:
            if ring.successor(key) != leaving:
                assert shrunk.successor(key) == ring.successor(key)


def test_the_next_in_id_order_steps_in_when_both_rings_agree() -> None:
    rings = DualRing.of(instances(3), 128)
    agreeing = [key for key in range(200) if rings.first.successor(key) == rings.second.successor(key)]

    assert agreeing
    for key in agreeing:
        first, second = rings.pair(key)
        assert rings.members[(rings.members.index(first) + 1) % 3] == second


def test_the_rings_are_independent_of_each_other() -> None:
    rings = DualRing.of(instances(8), 128)

    agreeing = sum(rings.first.successor(key) == rings.second.successor(key) for key in range(4000))

    assert agreeing / 4000 == pytest.approx(1 / 8, abs=0.04)


@pytest.mark.parametrize(("count", "virtual_nodes", "spread"), [(8, 128, 0.15), (32, 128, 0.15), (8, 1024, 0.06)])
def test_keys_spread_evenly_over_the_members(count: int, virtual_nodes: int, spread: float) -> None:
    ring = DualRing.of(instances(count), virtual_nodes).first

    shares = Counter(ring.successor(key) for key in range(8000 * count // 8)).values()

    assert len(shares) == count
    assert pstdev(shares) / mean(shares) < spread


def test_a_key_beyond_the_last_anchor_wraps_around() -> None:
    ring = Ring(RING_SEEDS[0], 1, array("Q", (1, 2)), ("a", "b"))

    assert ring.successor(0) == "a"


def test_anchors_on_the_same_spot_are_ordered_by_id() -> None:
    # given a ring whose anchors all fall together, as two hashes rarely do
    position = Ring(0, 1).with_change((), ["b"]).positions[0]
    crowded = Ring(0, 1, array("Q", (position, position)), ("a", "c"))

    grown = crowded.with_change((), ["b"])

    assert grown.owners == ("a", "b", "c")
    assert grown.with_change(["b"], ()) == crowded


@given(st.sets(st.sampled_from("abcdefgh")), st.sets(st.sampled_from("abcdefghij")))
def test_rings_of_some_members_are_those_that_were_made_for_them_alone(members: set[str], some: set[str]) -> None:
    assert DualRing.of(members, 16).among(some) == DualRing.of(members & some, 16)
