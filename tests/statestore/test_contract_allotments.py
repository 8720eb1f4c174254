"""The store contract: budgets that are divided among pools, on every backend."""

from __future__ import annotations

import pytest

from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.tenants.allotments import ROUND_S, Division
from dualmap.scheduling.tenants.budgets import Budget, Draw, Drawn, Draws, Limit, Measure, Period, budget_of
from dualmap.statestore.connect import Store
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.allotments import Allotment, Allotted, Wanted
from dualmap.statestore.tenants.allotment_ledger import LedgerEntry
from tests.statestore.samples import HandClock, finish, instance, place_drawing

MINUTE = Limit(Measure.TOKENS, Period.MINUTE, 6000)
DAY = Limit(Measure.TOKENS, Period.DAY, 6000)
IN_FLIGHT = Limit(Measure.REQUESTS, Period.IN_FLIGHT, 4)
OPEN = Division(("default", "other"), 0, begins=True)
CLOSED = Division(("default", "other"), 0, begins=False)


def draw(cost: int, limit: Limit = MINUTE, division: Division = OPEN) -> Draw:
    return Draw(Budget(budget_of("acme", limit), limit, division), cost)


async def allot(pool: PoolStore, stamp: int, part: int, limit: Limit = MINUTE, rest: int = 0) -> int | None:
    begins_with = limit.amount // 2
    return await pool.allotments.allot(
        Allotment(budget_of("acme", limit), limit.amount, begins_with, stamp, part, rest)
    )


@pytest.fixture(autouse=True)
async def members(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=100_000, max_running_requests=1000))


async def test_a_pool_admits_by_its_part_alone(pool: PoolStore) -> None:
    first = await place_drawing(pool, "r1", draw(3000))
    refused = await place_drawing(pool, "r2", draw(1))
    await allot(pool, 1, 3500)

    assert (first.status, first.drawn) == (PlaceStatus.DISPATCHED, Drawn((0,), parts={0: 3000})), (
        "an equal part, as nothing is entered"
    )
    assert refused.status is PlaceStatus.LIMITED
    assert (await place_drawing(pool, "r3", draw(500))).drawn == Drawn((0,), parts={0: 3500})


async def test_a_pool_without_a_part_admits_nothing_where_limits_are_closed(pool: PoolStore) -> None:
    refused = await place_drawing(pool, "r1", draw(1, division=CLOSED))
    await allot(pool, 1, 10)

    assert refused.drawn == Drawn((-1,), 0, ROUND_S, {0: 0})
    assert (await place_drawing(pool, "r2", draw(10, division=CLOSED))).status is PlaceStatus.DISPATCHED


async def test_the_part_of_the_rate_leaks(pool: PoolStore, clock: HandClock) -> None:
    await allot(pool, 1, 600)
    await place_drawing(pool, "r1", draw(600))
    refused = await place_drawing(pool, "r2", draw(100))
    clock.advance(9_999)
    early = await place_drawing(pool, "r3", draw(100))
    clock.advance(1)

    assert refused.drawn == Drawn((-100,), 0, ROUND_S + 1.0, {0: 600}), "a leader would bring what leaks in other pools"
    assert early.status is PlaceStatus.LIMITED
    assert (await place_drawing(pool, "r4", draw(100))).status is PlaceStatus.DISPATCHED


async def test_a_reply_says_when_nothing_will_be_used_of_the_part(pool: PoolStore, clock: HandClock) -> None:
    await allot(pool, 1, 600)
    drawing, undivided = draw(60), Limit(Measure.TOKENS, Period.MINUTE, 6000, "model:big")
    whole = Draw(Budget(budget_of("acme", undivided), undivided), 60)
    drawn = (await place_drawing(pool, "r1", drawing, whole)).drawn
    assert drawn is not None
    assert [drawn.unused_in_s(0, drawing.budget.capacity), drawn.unused_in_s(1, whole.budget.capacity)] == [6.0, 0.6]

    clock.advance(5_999)
    assert (await pool.allotments.of("acme/tokens/minute", 6000, 0)).used == 1
    clock.advance(1)
    assert (await pool.allotments.of("acme/tokens/minute", 6000, 0)).used == 0


async def test_what_leaked_at_the_former_rate_stays_so_when_a_part_changes(pool: PoolStore, clock: HandClock) -> None:
    await place_drawing(pool, "r1", draw(3000))
    clock.advance(30_000)  # half of it leaks
    await allot(pool, 1, 6000)
    clock.advance(10_000)

    found = await pool.allotments.of("acme/tokens/minute", 6000, 0)
    assert found == Allotted(6000, 1, 500)


async def test_what_is_used_is_not_taken_from_a_pool(pool: PoolStore) -> None:
    await place_drawing(pool, "r1", draw(2000, DAY), draw(1, IN_FLIGHT))

    assert await allot(pool, 1, 0, DAY) == 2000
    assert await allot(pool, 1, 0, IN_FLIGHT) == 1
    assert await allot(pool, 2, 0, MINUTE) == 0, "nothing is used of it"


async def test_a_change_is_made_once_and_none_before_it_afterwards(pool: PoolStore) -> None:
    assert await allot(pool, 5, 100) == 100
    assert await allot(pool, 5, 200) is None
    assert await allot(pool, 4, 300) is None

    assert (await pool.allotments.entered(["acme/tokens/minute", "acme/tokens/day"])).keys() == {"acme/tokens/minute"}
    assert (await pool.allotments.of("acme/tokens/minute", 6000, 0)).part == 100


async def test_a_limit_that_is_changed_is_in_force_at_once_in_the_same_parts(pool: PoolStore) -> None:
    await allot(pool, 1, 1500)
    lowered = Limit(Measure.TOKENS, Period.MINUTE, 3001)

    assert (await place_drawing(pool, "r1", draw(751, lowered))).status is PlaceStatus.LIMITED
    assert (await place_drawing(pool, "r2", draw(750, lowered))).status is PlaceStatus.DISPATCHED
    assert (await pool.allotments.wanted())["acme/tokens/minute"].amount == 3001, "it is to be divided again"


async def test_more_is_wanted_of_a_budget_that_is_near_its_end_or_too_small(pool: PoolStore) -> None:
    await place_drawing(pool, "r1", draw(10))
    assert await pool.allotments.wanted() == {"acme/tokens/minute": Wanted(0, 6000, ("default", "other"))}, "unknown"
    await allot(pool, 1, 1000)
    await place_drawing(pool, "r2", draw(700))
    assert await pool.allotments.wanted() == {}

    await place_drawing(pool, "r3", draw(100))
    assert (await pool.allotments.wanted())["acme/tokens/minute"].needs == 0
    await place_drawing(pool, "r4", draw(400))
    await place_drawing(pool, "r5", draw(1))
    assert (await pool.allotments.wanted())["acme/tokens/minute"].needs == 400


async def test_a_refusal_says_whether_others_have_what_it_lacks(pool: PoolStore) -> None:
    await allot(pool, 1, 100, DAY, rest=50)
    await place_drawing(pool, "r1", draw(100, DAY))

    assert (await place_drawing(pool, "r2", draw(50, DAY))).drawn == Drawn((-50,), 0, ROUND_S, {0: 100})
    assert (await place_drawing(pool, "r3", draw(51, DAY))).drawn == Drawn((-51,), 0, 0.0, {0: 100}), (
        "the quota is spent"
    )


async def test_an_answer_that_was_longer_than_expected_draws_at_the_rate_of_the_part(
    pool: PoolStore, clock: HandClock
) -> None:
    await allot(pool, 1, 600)
    await place_drawing(pool, "r1", draw(100))
    clock.advance(5_000)
    await finish(pool, "r1", returned=Draws.of(draw(-300)))

    assert (await pool.allotments.of("acme/tokens/minute", 6000, 0)).used == 350


async def test_changes_are_counted(pool: PoolStore) -> None:
    assert await pool.allotments.changes() == 0
    await allot(pool, 1, 5)
    await allot(pool, 1, 5)
    await allot(pool, 2, 5)

    assert await pool.allotments.changes() == 2


async def test_an_entry_of_the_ledger_is_made_on_the_one_before_it_alone(store: Store) -> None:
    ledger = store.allotments
    nothing = await ledger.entry("acme/tokens/minute")
    assert nothing == LedgerEntry()

    first = LedgerEntry(2, 6000, {"default": 4000, "other": 2000})
    assert await ledger.enter("acme/tokens/minute", nothing, first)
    assert not await ledger.enter("acme/tokens/minute", nothing, LedgerEntry(4, 6000, {"default": 6000}))
    found = await ledger.entry("acme/tokens/minute")
    assert found == first
    assert await ledger.enter("acme/tokens/minute", found, LedgerEntry(4, 6000, {"default": 6000}))
    assert await ledger.scan(0) == (0, {"acme/tokens/minute": LedgerEntry(4, 6000, {"default": 6000})})
