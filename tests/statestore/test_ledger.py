"""The ledger as the simulator drives it: grants in an outbox, KV metadata, fences, wishes, arrivals."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from statestore.base import Grant
from statestore.errors import LeaseLostError
from statestore.ledger import Leadership, PoolLedger
from statestore.ledger.arrivals import ArrivalLog, RebalanceWishes
from statestore.ledger.kv import KvMetadata
from statestore.ledger.text_ratio import MEMORY_TOKENS, TextRatio
from tests.statestore.samples import CHAIN, SCHEDULING, chain, instance, reservation


def test_grants_wait_in_the_outbox_until_they_are_taken() -> None:
    ledger = PoolLedger(SCHEDULING)
    ledger.put_instance(instance("a", dispatch_window_tokens=400), 0)
    ledger.reserve(reservation("sent"), 1)
    ledger.reserve(reservation("held", replica_id="two"), 2)

    ledger.first_token("sent", "a", CHAIN, 3)

    assert ledger.take_grants() == [("two", Grant("held", "a", 1, 400))]
    assert ledger.take_grants() == ()


def test_the_callers_own_dispatch_is_no_grant() -> None:
    ledger = PoolLedger(SCHEDULING)
    ledger.put_instance(instance("a"), 0)

    ledger.reserve(reservation("r"), 1)

    assert ledger.take_grants() == ()


def growing_tree(random_source: random.Random) -> Iterator[list[tuple[int, ...]]]:
    """Chains of up to 12 blocks that branch off one another, after each new one."""
    tree: list[tuple[int, ...]] = [()]
    for _ in range(2000):
        parent = random_source.choice(tree[-50:])
        tree.append((*parent, random_source.getrandbits(64)) if len(parent) < 12 else parent)
        yield tree


def test_kv_metadata_stays_closed_under_prefixes_and_within_capacity() -> None:
    random_source = random.Random(5)
    metadata, capacity = KvMetadata(), 40
    for tree in growing_tree(random_source):
        metadata.give(tree[-1], capacity)

        assert len(metadata) <= capacity
        known = random_source.choice(tree)
        listed = [block in metadata for block in known]
        assert listed == sorted(listed, reverse=True), "a block is listed only if its whole prefix is"
        assert metadata.hit_blocks(known) == sum(listed)


def test_what_is_given_is_closed_under_prefixes_and_found_from_any_guess() -> None:
    random_source = random.Random(7)
    metadata, capacity = KvMetadata(), 40
    for tree in growing_tree(random_source):
        enter = random_source.choice((metadata.give, metadata.promise))
        enter(tree[-1], capacity)

        known = random_source.choice(tree[-60:])
        given = [metadata.given_blocks((block,)) == 1 for block in known]
        assert given == sorted(given, reverse=True), "a block is given only if its whole prefix is"
        assert metadata.given_blocks(known, random_source.randrange(-2, 15)) == sum(given)
        assert metadata.hit_blocks(known) >= sum(given)


def test_a_promise_takes_nothing_back() -> None:
    metadata = KvMetadata()
    metadata.give((1, 2), 10)

    metadata.promise((1, 2, 3, 4), 10)

    assert (metadata.given_blocks((1, 2, 3, 4)), metadata.hit_blocks((1, 2, 3, 4))) == (2, 4)


def test_an_instance_without_cache_lists_nothing() -> None:
    metadata = KvMetadata()

    metadata.give((1, 2, 3), 0)

    assert len(metadata) == 0


def test_fences_grow_even_over_a_lost_store() -> None:
    before, after = Leadership(), Leadership()
    first = before.acquire("worker-1", 1000, now_ms=5_000)
    second = after.acquire("worker-2", 1000, now_ms=5_001)

    assert first is not None
    assert second is not None
    assert second.fence > first.fence
    with pytest.raises(LeaseLostError):
        after.check(first.fence, 5_002)


def test_the_arrival_log_forgets_the_oldest_and_cuts_heads() -> None:
    log = ArrivalLog(max_entries=3, head_blocks=2)
    for number in range(5):
        log.add(number, (number, number, number))

    arrivals = log.after("0", 10)

    assert [arrival.head for arrival in arrivals] == [(2, 2), (3, 3), (4, 4)]
    assert [arrival.at_ms for arrival in log.after(arrivals[0].entry_id, 1)] == [3]
    assert log.after(arrivals[-1].entry_id, 10) == []


def test_wishes_are_taken_oldest_first_and_once() -> None:
    wishes = RebalanceWishes()
    for instance_id, now_ms in (("b", 1), ("a", 1), ("c", 0), ("b", 5)):
        wishes.add(instance_id, now_ms)

    assert (wishes.take(), wishes.take()) == (["c", "a", "b"], [])


def test_old_prompts_fade_from_the_text_ratio() -> None:
    ratio = TextRatio(4.0)
    for _ in range(2 * MEMORY_TOKENS // 100_000):
        ratio.learn(400_000, 100_000)
    for _ in range(4 * MEMORY_TOKENS // 100_000):
        ratio.learn(200_000, 100_000)

    assert ratio.bytes_per_token == pytest.approx(2.0, rel=0.12)


def test_a_chain_that_is_stamped_again_is_younger_than_what_came_between() -> None:
    metadata = KvMetadata()
    for hashes in (chain(1, 2).hashes, chain(3, 4).hashes, chain(1, 2).hashes, chain(5, 6).hashes):
        metadata.give(hashes, 4)

    assert metadata.oldest_first() == [2, 1, 6, 5]
