"""The blocks of tiers by an engine's events."""

from __future__ import annotations

import pytest

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.statestore.kv_views import TierChange
from dualmap.workers.kv_events.tier_holdings import TierHoldings

BLOCK_TOKENS = 4
DEVICE = {name: 100 + name for name in range(1, 10)}
"""The fleet's hashes of blocks on the device, by the engine's names."""


def held_by(**tokens: int) -> TierHoldings:
    return TierHoldings({Tier(name): size for name, size in tokens.items()})


def store(holdings: TierHoldings, tier: Tier, *names: int) -> None:
    holdings.store(tier, names, DEVICE.get, BLOCK_TOKENS)


def change_of(holdings: TierHoldings, tier: Tier = Tier.HOST) -> TierChange | None:
    return holdings.take_change(BLOCK_TOKENS).get(tier)


def test_names_are_told_by_the_hashes_that_the_device_has() -> None:
    holdings = held_by(host=40)
    store(holdings, Tier.HOST, 2, 1)
    first = change_of(holdings)
    holdings.remove(Tier.HOST, [1, 7])

    assert first == TierChange([102, 101], [], 10)
    assert change_of(holdings) == TierChange([], [101], 10)
    assert change_of(holdings) is None


def test_a_name_that_the_device_has_later_counts_then() -> None:
    holdings = held_by(host=40)
    store(holdings, Tier.HOST, 50)
    before = change_of(holdings)
    holdings.learn(50, 150)
    holdings.learn(51, 151)

    assert before is None
    assert change_of(holdings) == TierChange([150], [], 10)


def test_nothing_is_kept_of_names_that_the_device_never_has_once_their_tiers_have_lost_them() -> None:
    holdings = held_by(host=40, disk=80)
    for name in range(100, 200):
        store(holdings, Tier.HOST, name)
    store(holdings, Tier.DISK, 198, 199)
    holdings.remove(Tier.HOST, range(100, 200))

    assert holdings._nameless == {198, 199}
    holdings.learn(199, 7)
    assert holdings.take_change(BLOCK_TOKENS) == {Tier.DISK: TierChange([7], [], 20)}


def test_a_name_that_another_tier_has_is_known() -> None:
    holdings = held_by(host=40, disk=80)
    store(holdings, Tier.DISK, 3)
    holdings.take_change(BLOCK_TOKENS)
    holdings.store(Tier.HOST, [3], {}.get, BLOCK_TOKENS)

    assert holdings.take_change(BLOCK_TOKENS) == {Tier.HOST: TierChange([103], [], 10)}


def test_what_comes_and_goes_within_one_change_is_gone_and_the_other_way_round() -> None:
    holdings = held_by(host=40)
    store(holdings, Tier.HOST, 1)
    holdings.remove(Tier.HOST, [1])
    gone = change_of(holdings)
    store(holdings, Tier.HOST, 1)
    holdings.take_change(BLOCK_TOKENS)
    holdings.remove(Tier.HOST, [1])
    store(holdings, Tier.HOST, 1)

    assert gone == TierChange([], [101], 10)
    assert change_of(holdings) == TierChange([101], [], 10)


def test_what_is_announced_again_is_one_block_and_is_the_last_to_be_forgotten() -> None:
    holdings = held_by(disk=12)
    for names in ((1, 2, 3), (1,), (4,)):
        store(holdings, Tier.DISK, *names)
    entries = holdings.take_entries()
    holdings.remove(Tier.DISK, [1])

    assert (len(holdings), sum(known == b"" for known in entries.values())) == (2, 1)
    change = holdings.take_change(BLOCK_TOKENS)[Tier.DISK]
    assert (change.stored, change.removed, change.most_blocks) == ([102, 103, 104], [101], 3)


@pytest.mark.parametrize(
    ("there", "announced", "meant"),
    [
        (("host",), Tier.HOST, Tier.HOST),
        (("pool",), Tier.HOST, Tier.POOL),
        (("host", "pool"), Tier.HOST, Tier.HOST),
        (("disk",), Tier.POOL, Tier.DISK),
        (("pool",), Tier.DISK, Tier.POOL),
        (("disk",), Tier.HOST, None),
        ((), Tier.POOL, None),
    ],
)
def test_an_announced_tier_is_the_one_of_the_settings_that_it_may_mean(
    there: tuple[str, ...], announced: Tier, meant: Tier | None
) -> None:
    holdings = held_by(**dict.fromkeys(there, 40))
    store(holdings, announced, 1)
    holdings.remove(announced, [2])

    assert list(holdings.take_change(BLOCK_TOKENS)) == ([] if meant is None else [meant])


def test_another_subscriber_continues_by_the_entries() -> None:
    holdings = held_by(host=40, pool=40)
    store(holdings, Tier.HOST, 1, 60)
    store(holdings, Tier.POOL, 2)
    every = holdings.take_entries(every=True)
    heir = held_by(host=40, pool=40)
    heir.restore(every)
    heir.learn(60, 160)
    heir.remove(Tier.HOST, [1])

    assert (len(heir), holdings.take_entries()) == (3 - 1, {})
    assert heir.take_change(BLOCK_TOKENS) == {Tier.HOST: TierChange([160], [101], 10)}
    holdings.send_again()
    assert holdings.take_entries() == every
