"""The view that follows from an engine's events."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import pytest

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.prompts.engine_blocks import BlockExtras, engine_chain
from dualmap.statestore.kv_views import KvChange, TierChange
from dualmap.workers.kv_events.decoding import Adapter, Batch, Cleared, Event, Removed, Stored
from dualmap.workers.kv_events.engine_view import MAX_BLOCKS, EngineView
from dualmap.workers.kv_events.group_holdings import AmbiguousEventsError

IDS = list(range(50, 62))
CHAIN = engine_chain(IDS, 4).hashes
TIERS = {Tier.HOST: 400}


def stored(*names: int, parent: int | None = None, at: int = 0, **changes: Any) -> Stored:
    """Blocks of IDS, from the block ``at`` on, under these names."""
    ids = array("I", IDS[4 * at : 4 * (at + len(names))]).tobytes()
    fields: dict[str, Any] = {"extras": [], "tier": None, "group": 0, "translatable": True, "block_tokens": 4}
    return Stored(names, parent, ids, **(fields | changes))


def removed(*names: int, tier: Tier | None = None) -> Removed:
    return Removed(names, tier)


def apply(view: EngineView, *events: Event) -> tuple[KvChange, bool]:
    view.apply(Batch(1, 2.0, events, 0))
    return view.take_change(1, 2.0)


def after(names: Mapping[bytes, bytes], change: KvChange) -> dict[bytes, bytes]:
    """The entries that the store keeps, by name."""
    kept = {**names, **change.names}
    return {name: known for name, known in kept.items() if known}


def test_stored_blocks_get_the_hashes_of_the_prompt() -> None:
    view = EngineView()

    change, cleared = apply(view, stored(1, 2), stored(3, parent=2, at=2))

    assert (change.stored, change.removed, cleared) == (list(CHAIN), [], False)
    assert (change.sequence, change.published_s, len(change.names), len(view)) == (1, 2.0, 3, 3)


def test_extra_keys_lead_to_the_hashes_of_a_prompt_with_them() -> None:
    extras = BlockExtras.of("adapter", "salt")

    change, _ = apply(EngineView(), stored(1, 2, 3, extras=[extras.at[0], extras.usual, extras.usual]))

    assert list(change.stored) == list(engine_chain(IDS, 4, extras).hashes)


def test_a_removed_block_is_named_by_the_engine() -> None:
    view = EngineView()
    apply(view, stored(1, 2, 3))

    change, _ = apply(view, removed(3, 99))

    assert (change.stored, change.removed, list(change.names.values())) == ([], [CHAIN[2]], [b""])


def test_what_comes_and_goes_within_one_change_is_gone() -> None:
    view = EngineView()
    apply(view, stored(1))

    change, _ = apply(view, stored(2, parent=1, at=1), removed(2), removed(1), stored(1))
    later, _ = apply(view, stored(2, parent=1, at=1))

    assert (change.stored, change.removed) == ([], [CHAIN[1]])
    assert (later.stored, later.removed) == ([CHAIN[1]], [])


def test_what_comes_back_under_another_name_within_one_change_is_held() -> None:
    view = EngineView()
    apply(view, stored(1))

    change, _ = apply(view, removed(1), stored(9))

    assert (change.stored, change.removed) == ([CHAIN[0]], [])


def test_a_block_that_is_held_twice_is_gone_when_both_copies_are() -> None:
    view = EngineView()
    first, _ = apply(view, stored(1, 2), stored(1, 2))
    once, _ = apply(view, removed(2))
    twice, _ = apply(view, removed(2))

    assert (first.stored, once.removed, twice.removed) == (list(CHAIN[:2]), [], [CHAIN[1]])


def test_another_subscriber_continues_by_the_names() -> None:
    view = EngineView(sizes=TIERS)
    change, _ = apply(view, stored(1, 2), stored(1, 2), stored(2, 7, tier=Tier.HOST))

    other = EngineView(after({}, change), TIERS)
    added, _ = apply(other, stored(3, parent=2, at=2))
    gone, _ = apply(other, removed(3, 2), removed(2), removed(7, 2, tier=Tier.HOST))

    assert (added.stored, gone.removed, other.tier_blocks) == ([CHAIN[2]], [CHAIN[2], CHAIN[1]], 0)
    assert gone.tiers[Tier.HOST].removed == [CHAIN[1]]
    assert len(after(after(after({}, change), added), gone)) == 1


def test_a_cleared_cache_is_dropped_and_what_follows_is_kept() -> None:
    view = EngineView()
    apply(view, stored(1, 2))

    change, cleared = apply(view, Cleared(), stored(1))

    assert (cleared, change.stored, change.removed, len(view)) == (True, [CHAIN[0]], [], 1)
    assert apply(view)[1] is False


def test_blocks_of_a_tier_are_no_hits_on_the_device_and_go_by_themselves() -> None:
    view = EngineView(sizes=TIERS)

    first, _ = apply(view, stored(1), stored(1, tier=Tier.HOST))
    second, _ = apply(view, removed(1))
    third, _ = apply(view, stored(1), removed(1, tier=Tier.HOST))

    assert (first.stored, first.tiers) == ([CHAIN[0]], {Tier.HOST: TierChange([CHAIN[0]], [], 100)})
    assert (second.removed, second.tiers) == ([CHAIN[0]], {})
    assert (third.stored, third.removed, third.tiers) == ([CHAIN[0]], [], {Tier.HOST: TierChange([], [CHAIN[0]], 100)})
    assert (len(view), view.tier_blocks) == (1, 0)


def test_a_cleared_device_leaves_the_tiers() -> None:
    view = EngineView(sizes=TIERS)
    apply(view, stored(1), stored(1, tier=Tier.HOST))

    change, cleared = apply(view, Cleared())
    heir = EngineView(after({}, change), TIERS)
    gone, _ = apply(heir, removed(1, tier=Tier.HOST))

    assert (cleared, change.tiers) == (True, {})
    assert gone.tiers[Tier.HOST].removed == [CHAIN[0]]


def test_tiers_that_the_instance_has_not_cost_nothing() -> None:
    view = EngineView()

    change, _ = apply(view, stored(1), stored(1, tier=Tier.HOST), removed(1, tier=Tier.POOL))

    assert (change.tiers, len(change.names), view.named_blocks) == ({}, 1, 1)


def test_tiers_of_a_hybrid_model_are_not_followed() -> None:
    view = EngineView(sizes=TIERS)

    change, _ = apply(view, stored(1, group=1), stored(1, group=1, tier=Tier.HOST))

    assert (change.tiers, view.tier_blocks, len(view)) == ({}, 0, 1)


@pytest.mark.parametrize("event", [stored(2, parent=77, at=1), stored(2, at=1, translatable=False)])
def test_blocks_whose_parent_or_adapter_is_unknown_are_left_out(event: Stored) -> None:
    view = EngineView()

    change, _ = apply(view, event, stored(3, parent=2, at=2), removed(2))

    assert (change.stored, change.removed, view.orphans) == ([], [], 2)


@pytest.mark.parametrize(
    "event",
    [
        Stored([2], None, b"1234", block_tokens=4, extras=[], tier=None, group=0, translatable=True),
        stored(2, group=1),
        Stored([2], None, bytes(8), block_tokens=2, extras=[], tier=None, group=0, translatable=True),
        stored(2, extras=[b"", b""]),
    ],
    ids=["token ids", "group", "block size", "extra keys"],
)
def test_what_is_ambiguous_is_refused(event: Stored) -> None:
    view = EngineView()
    apply(view, stored(1))

    with pytest.raises(AmbiguousEventsError):
        apply(view, event)


def test_memory_is_bounded() -> None:
    names = range(MAX_BLOCKS + 1)
    with pytest.raises(AmbiguousEventsError, match="over"):
        apply(
            EngineView(),
            Stored(
                names, None, bytes(4 * len(names)), block_tokens=1, extras=[], tier=None, group=0, translatable=True
            ),
        )


def test_all_names_are_those_of_every_block_that_is_held() -> None:
    view = EngineView(sizes=TIERS)
    first, _ = apply(view, stored(1, 2), stored(8, tier=Tier.HOST))
    second, _ = apply(view, removed(2), stored(9, tier=Tier.HOST))

    change, _ = view.take_change(3, 4.0, all_names=True)

    assert change.all_names and change.names == after(after({}, first), second) and len(change.names) == 3
    assert EngineView(change.names, TIERS).named_blocks == view.named_blocks == 3
    later, _ = apply(view, removed(1))
    assert not later.all_names and len(later.names) == 1


def test_blocks_are_told_as_stored_and_removed_beside_all_names() -> None:
    view = EngineView()
    apply(view, stored(1, 2))

    view.apply(Batch(1, 2.0, (stored(3, parent=2, at=2), removed(1), removed(8, tier=Tier.HOST)), 0))
    change, _ = view.take_change(3, 4.0, all_names=True)

    assert (list(change.stored), list(change.removed)) == ([CHAIN[2]], [CHAIN[0]])
    assert len(change.names) == 2


NAME = "sql-writer"
OF_ADAPTER = engine_chain(IDS, 4, BlockExtras.of(NAME)).hashes


def of_adapter(*names: int, number: int, **how: Any) -> Stored:
    """Blocks of the adapter, which has this number."""
    return stored(*names, extras=[BlockExtras.of(NAME).usual] * len(names), adapter=Adapter(NAME, number), **how)


def test_names_from_before_a_gap_place_what_is_stored_behind_it_but_for_those_of_adapters() -> None:
    former, adapted = EngineView(sizes=TIERS), EngineView()
    apply(former, stored(1, 2))
    apply(adapted, of_adapter(1, 2, number=1))
    again = EngineView(former=EngineView(former=former))
    view, other = EngineView(sizes=TIERS, former=former), EngineView(former=adapted)

    change, _ = apply(view, stored(3, parent=2, at=2), stored(2, tier=Tier.HOST))
    apply(other, of_adapter(3, number=1, parent=2, at=2))

    assert (change.stored, change.tiers[Tier.HOST].stored, len(view), view.orphans) == ([CHAIN[2]], [CHAIN[1]], 1, 0)
    assert apply(again, stored(3, parent=2, at=2))[0].stored == [CHAIN[2]]
    assert (len(other), other.orphans) == (0, 1)


def test_an_adapter_that_is_pointed_at_other_weights_hits_none_of_the_blocks_of_the_former_ones() -> None:
    view = EngineView()
    first, _ = apply(view, of_adapter(1, 2, 3, number=1))
    assert list(first.stored) == list(OF_ADAPTER)

    moved, _ = apply(view, of_adapter(11, number=2))

    assert (moved.stored, set(moved.removed)) == ([], set(OF_ADAPTER[1:])), "the first block is held for the new ones"


def test_the_hash_of_a_block_goes_with_the_last_name_that_it_had() -> None:
    view = EngineView()
    apply(view, of_adapter(1, 2, number=1))
    apply(view, of_adapter(11, 12, number=2))

    of_the_former, _ = apply(view, removed(1, 2))
    of_the_last, _ = apply(view, removed(12))

    assert (of_the_former.stored, of_the_former.removed) == ([], [])
    assert (of_the_last.stored, of_the_last.removed) == ([], [OF_ADAPTER[1]])


def test_the_last_name_that_goes_first_leaves_no_hit_behind() -> None:
    view = EngineView()
    apply(view, of_adapter(1, number=1))
    apply(view, of_adapter(11, number=2))

    change, _ = apply(view, removed(11))

    assert (change.stored, change.removed) == ([], [OF_ADAPTER[0]])


def test_a_request_of_the_former_weights_that_still_runs_adds_no_hit() -> None:
    view = EngineView()
    apply(view, of_adapter(11, number=2))

    change, _ = apply(view, of_adapter(2, 3, parent=11, at=1, number=1))

    assert change.stored == []


def test_other_adapters_and_the_model_itself_keep_their_blocks() -> None:
    view = EngineView()
    other = BlockExtras.of("other")
    of_other = stored(7, extras=[other.usual], adapter=Adapter("other", 1))
    apply(view, stored(1), of_other, of_adapter(21, number=2))

    change, _ = apply(view, of_adapter(31, number=3))

    assert (change.stored, change.removed) == ([], [])


def test_one_that_is_loaded_and_evicted_between_two_changes_is_gone() -> None:
    view = EngineView()
    change, _ = apply(view, of_adapter(1, number=1), of_adapter(11, number=2), removed(11))
    assert (change.stored, change.removed) == ([], [OF_ADAPTER[0]])


@pytest.mark.parametrize("all_names", [False, True])
def test_a_later_subscriber_knows_which_weights_a_block_is_of(all_names: bool) -> None:
    view, names = EngineView(), dict[bytes, bytes]()
    for event in (of_adapter(1, 2, number=1), of_adapter(11, number=2)):
        view.apply(Batch(1, 2.0, [event], 0))
        change, _ = view.take_change(1, 2.0, all_names=all_names)
        names = after({} if all_names else names, change)

    heir = EngineView(names)
    of_the_former, _ = apply(heir, removed(1, 2))
    names = after(names, of_the_former)
    of_the_last, _ = apply(heir, removed(11))
    names = after(names, of_the_last)

    assert (of_the_former.stored, of_the_former.removed, of_the_last.removed) == ([], [OF_ADAPTER[1]], [OF_ADAPTER[0]])
    assert names == {}


def test_a_cleared_cache_knows_no_blocks_of_adapters() -> None:
    view = EngineView()
    apply(view, of_adapter(1, number=1))
    change, cleared = apply(view, Cleared(), of_adapter(5, number=1))
    assert (change.stored, change.removed, cleared) == ([OF_ADAPTER[0]], [], True)


def test_what_a_tier_announced_before_the_device_did_counts_from_then_on() -> None:
    view = EngineView(sizes=TIERS)
    announced, _ = apply(view, stored(1, tier=Tier.HOST))
    known, _ = apply(view, stored(1))

    assert announced.tiers == {}
    assert known.tiers[Tier.HOST].stored == [CHAIN[0]]
