"""The store contract: budgets of tenants, on every backend."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.request.metering import KEPT
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.tenants.budgets import (
    Budget,
    Draw,
    Drawn,
    Draws,
    Limit,
    Measure,
    Period,
    budgets_of,
    drawn_text,
    nothing_of,
)
from dualmap.statestore.errors import StoreError
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.changes import Change
from dualmap.statestore.pool.codec import BUDGET, WORK
from tests.statestore.samples import HandClock, assert_sums_hold, finish, instance, place_drawing, placement, record

MINUTE_TOKENS = Limit(Measure.TOKENS, Period.MINUTE, 6000)
IN_FLIGHT = Limit(Measure.REQUESTS, Period.IN_FLIGHT, 2)


def draw(cost: int, limit: Limit = MINUTE_TOKENS, budget: str = "acme/tokens/minute") -> Draw:
    return Draw(Budget(budget, limit), cost)


def one_in_flight() -> Draw:
    return draw(1, IN_FLIGHT, "acme/requests/in_flight")


@pytest.fixture(autouse=True)
async def members(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=100_000, max_running_requests=1000))


async def test_a_request_is_admitted_while_its_budget_has_enough_left(pool: PoolStore) -> None:
    first = await place_drawing(pool, "r1", draw(4000))
    refused = await place_drawing(pool, "r2", draw(2001))
    last = await place_drawing(pool, "r3", draw(2000))

    assert (first.status, first.drawn) == (PlaceStatus.DISPATCHED, Drawn((2000,)))
    assert refused.status is PlaceStatus.LIMITED
    assert last.drawn == Drawn((0,))
    assert (await pool.records(["r2"])) == {}, "a refused request reserves nothing"
    await assert_sums_hold(pool)


async def test_a_refusal_says_when_the_request_would_fit_and_it_does_then(pool: PoolStore, clock: HandClock) -> None:
    await place_drawing(pool, "r1", draw(6000))
    refused = await place_drawing(pool, "r2", draw(1500))
    assert refused.drawn is not None
    assert (refused.drawn.unmet, refused.drawn.wait_s) == (0, 15.0)

    clock.advance(14_999)
    assert (await place_drawing(pool, "r3", draw(1500))).status is PlaceStatus.LIMITED
    clock.advance(1)
    assert (await place_drawing(pool, "r4", draw(1500))).status is PlaceStatus.DISPATCHED


async def test_all_budgets_are_drawn_from_or_none_and_the_longest_wait_is_told(pool: PoolStore) -> None:
    requests = draw(1, Limit(Measure.REQUESTS, Period.MINUTE, 1), "acme/requests/minute")
    await place_drawing(pool, "r1", draw(1000), requests)

    refused = await place_drawing(pool, "r2", draw(5900), requests)
    assert refused.drawn is not None
    assert (refused.drawn.unmet, refused.drawn.wait_s) == (1, 60.0)
    assert (await place_drawing(pool, "r3", draw(5000))).status is PlaceStatus.DISPATCHED, (
        "the refused one drew nothing"
    )


async def test_what_was_not_used_is_given_back_at_the_end(pool: PoolStore) -> None:
    await place_drawing(pool, "r1", draw(6000))

    await finish(pool, "r1", returned=Draws.of(draw(4500)))

    assert (await place_drawing(pool, "r2", draw(4500))).drawn == Drawn((0,))


async def test_a_longer_answer_than_expected_overdraws_the_budget(pool: PoolStore, clock: HandClock) -> None:
    await place_drawing(pool, "r1", draw(1000))
    await finish(pool, "r1", returned=Draws.of(draw(-6000)))

    refused = await place_drawing(pool, "r2", draw(1))
    clock.advance(10_010)

    assert refused.status is PlaceStatus.LIMITED
    assert (await place_drawing(pool, "r3", draw(1))).status is PlaceStatus.DISPATCHED


async def test_the_end_of_a_request_without_an_answer_gives_everything_back_once(pool: PoolStore) -> None:
    await place_drawing(pool, "r1", draw(6000), one_in_flight())

    await finish(pool, "r1")
    await finish(pool, "r1")

    again = await place_drawing(pool, "r2", draw(6000), one_in_flight())
    assert again.drawn == Drawn((0, 1))


async def test_what_is_in_flight_is_bounded_and_freed_by_ends_alone(pool: PoolStore, clock: HandClock) -> None:
    await place_drawing(pool, "r1", one_in_flight())
    await place_drawing(pool, "r2", one_in_flight())
    clock.advance(3_600_000)
    refused = await place_drawing(pool, "r3", one_in_flight())
    await finish(pool, "r1", returned=Draws.of(one_in_flight()))

    assert refused.drawn == Drawn((-1,), 0, 0.0)
    assert (await place_drawing(pool, "r4", one_in_flight())).status is PlaceStatus.DISPATCHED


async def test_a_lowered_limit_counts_what_is_used_already(pool: PoolStore) -> None:
    for request_id in ("r1", "r2"):
        await place_drawing(pool, request_id, one_in_flight())
    lowered = draw(1, replace(IN_FLIGHT, amount=1), "acme/requests/in_flight")

    await finish(pool, "r1", returned=Draws.of(one_in_flight()))
    assert (await place_drawing(pool, "r3", lowered)).status is PlaceStatus.LIMITED
    await finish(pool, "r2", returned=Draws.of(one_in_flight()))
    assert (await place_drawing(pool, "r4", lowered)).status is PlaceStatus.DISPATCHED


async def test_a_request_that_was_admitted_before_overdraws_rather_than_being_refused(pool: PoolStore) -> None:
    await place_drawing(pool, "r1", draw(6000))

    retried = await place_drawing(pool, "r2", draw(500), must_draw=True)

    assert (retried.status, retried.drawn) == (PlaceStatus.DISPATCHED, Drawn((-500,)))


async def test_a_repetition_of_a_placement_draws_once(pool: PoolStore) -> None:
    await place_drawing(pool, "r1", draw(4000))
    await place_drawing(pool, "r1", draw(4000))

    assert (await place_drawing(pool, "r2", draw(2000))).drawn == Drawn((0,))


async def test_a_request_that_finds_no_room_draws_nothing(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", max_running_requests=0, max_queued_requests=0))

    refused = await place_drawing(pool, "r1", draw(6000))

    await pool.members.put_instance(instance("a"))
    assert refused.status is PlaceStatus.QUEUE_FULL
    assert (await place_drawing(pool, "r2", draw(6000))).status is PlaceStatus.DISPATCHED


async def test_many_replicas_at_once_admit_the_limit_to_the_token(pool: PoolStore) -> None:
    replies = await asyncio.gather(*[place_drawing(pool, f"r{number}", draw(70)) for number in range(200)])

    admitted = sum(reply.status is PlaceStatus.DISPATCHED for reply in replies)
    assert admitted == 6000 // 70


def quota(cost: int, period: Period = Period.MONTH) -> Draw:
    return draw(cost, Limit(Measure.TOKENS, period, 5000), f"acme/tokens/{period}")


TO_NEXT_DAY_MS = 6_400_000
"""From the first time of the clock, the 14th of a month at 22:13:20."""
TO_NEXT_MONTH_MS = TO_NEXT_DAY_MS + 16 * 86_400_000


@pytest.mark.parametrize(("period", "begins_ms"), [(Period.DAY, TO_NEXT_DAY_MS), (Period.MONTH, TO_NEXT_MONTH_MS)])
async def test_a_quota_begins_anew_with_its_period(
    pool: PoolStore, clock: HandClock, period: Period, begins_ms: int
) -> None:
    await place_drawing(pool, "r1", quota(5000, period))
    clock.advance(begins_ms - 1)
    spent = await place_drawing(pool, "r2", quota(1, period))
    clock.advance(1)

    begun = await place_drawing(pool, "r3", quota(4000, period))

    assert (spent.status, begun.drawn) == (PlaceStatus.LIMITED, Drawn((1000,)))


async def test_what_a_request_of_the_former_period_gives_back_is_not_of_the_new_one(
    pool: PoolStore, clock: HandClock
) -> None:
    await place_drawing(pool, "r1", quota(5000), one_in_flight())
    clock.advance(TO_NEXT_MONTH_MS)
    await place_drawing(pool, "r2", quota(4000))

    await finish(pool, "r1", returned=Draws.of(quota(4900), one_in_flight()))

    assert (await place_drawing(pool, "r3", quota(1), one_in_flight())).drawn == Drawn((999, 1))


async def test_what_leaked_away_is_no_credit_for_a_longer_answer(pool: PoolStore, clock: HandClock) -> None:
    await place_drawing(pool, "r1", draw(1000))
    clock.advance(60_000)
    await finish(pool, "r1", returned=Draws.of(draw(-2000)))

    assert (await place_drawing(pool, "r2", draw(1))).drawn == Drawn((3999,))


@pytest.mark.parametrize("together", [True, False])
async def test_requests_that_end_in_one_call_give_back_what_they_would_one_by_one(
    pool: PoolStore, together: bool
) -> None:
    for name in ("less", "longer", "all"):
        await place_drawing(pool, name, draw(1000), quota(1000))
    ends = [
        Release("less", returned=Draws.of(draw(900), quota(900))),
        Release("longer", returned=Draws.of(draw(-500), quota(-500))),
        Release("all"),
        Release("less", returned=Draws.of(draw(900), quota(900))),
    ]

    for calls in [ends] if together else [[each] for each in ends]:
        await pool.release(calls)

    last = await place_drawing(pool, "r4", draw(1), quota(1))
    assert last.drawn == Drawn((6000 - 1601, 5000 - 1601))


async def test_requests_of_one_call_draw_one_after_the_other_and_a_refused_one_draws_nothing(pool: PoolStore) -> None:
    draws = [(3000, 1), (2500, 1), (2000, 1), (400, 1)]

    replies = await asyncio.gather(
        *[place_drawing(pool, f"r{place}", draw(tokens), quota(of)) for place, (tokens, of) in enumerate(draws)]
    )

    assert [reply.status is PlaceStatus.DISPATCHED for reply in replies] == [True, True, False, True]
    assert [reply.drawn and reply.drawn.left for reply in replies] == [
        (3000, 4999),
        (500, 4998),
        (-1500, 4997),
        (100, 4997),
    ]


DAMAGED = WORK.pack(*[math.nan] * 7)


@pytest.mark.parametrize(
    "text",
    [b"a lot", b"", b"7" * 57, DAMAGED, DAMAGED + BUDGET.pack(12, math.nan, math.nan), DAMAGED + b"9" * 17 * 99],
    ids=str,
)
async def test_a_budget_that_somebody_damaged_counts_as_unused(pool: PoolStore, text: bytes) -> None:
    await pool._calls.command("HSET", pool._keys.books, "acme", text)

    assert (await place_drawing(pool, "r1", draw(6000))).drawn == Drawn((0,))


@pytest.mark.parametrize("drawn", ["nonsense", "acme/tokens/minute many", " "])
async def test_draws_that_somebody_damaged_do_not_keep_a_request_from_ending(pool: PoolStore, drawn: str) -> None:
    await pool.place(placement("r1", tokens=100, tenant="acme", drawn=drawn))

    assert (await finish(pool, "r1")).done

    assert await pool.records(["r1"]) == {}


async def test_the_record_of_a_request_says_what_it_drew(pool: PoolStore) -> None:
    await place_drawing(pool, "r1", draw(4000), one_in_flight())

    stored = await record(pool, "r1")
    assert (stored.tenant, stored.drawn) == ("acme", "acme/tokens/minute 4000 acme/requests/in_flight 1")


async def test_a_store_that_came_back_empty_knows_again_what_is_in_flight(pool: PoolStore) -> None:
    await place_drawing(pool, "r1", one_in_flight())
    lost = await record(pool, "r1")
    await pool._calls.command("DEL", pool._keys.books, pool._keys.request("r1"))

    await pool.adopt([lost])

    assert (await place_drawing(pool, "r2", one_in_flight())).drawn == Drawn((0,))


async def test_a_request_that_is_passed_on_comes_back_into_an_empty_store_with_what_it_drew(pool: PoolStore) -> None:
    draws = Draws.of(one_in_flight())
    asked = replace(placement("r1").request, tenant="acme", drawn=drawn_text(draws), account="acme ci - m")
    assert (await pool.register(asked, draws))[0] is PlaceStatus.DISPATCHED
    lost = await record(pool, "r1")
    await pool._calls.command("DEL", pool._keys.books, pool._keys.request("r1"), pool._keys.passed_on)

    assert await pool.adopt([lost]) == 1
    assert await pool.adopt([lost]) == 0
    assert [each.request_id for each in await pool.requests_of("one")] == ["r1"]
    assert (await place_drawing(pool, "r2", one_in_flight())).drawn == Drawn((0,))
    await finish(pool, "r1", used="1 9 0 2 0 0 0 completed reported")

    assert (await place_drawing(pool, "r3", one_in_flight())).drawn == Drawn((0,))
    assert await pool.requests_of("one") == [await record(pool, "r2"), await record(pool, "r3")]


async def test_requests_of_one_call_give_back_what_they_drew_though_the_store_fails_at_one(
    pool: PoolStore, request: pytest.FixtureRequest
) -> None:
    if "[memory]" in request.node.name:
        pytest.skip("its keys have no types that somebody could change")
    for number in range(2):
        await place_drawing(pool, f"r{number}", one_in_flight())
    key = pool._keys.running("a")
    await pool._make(Change([("DEL", key), ("LPUSH", key, "stray")]))

    with pytest.raises(StoreError, match="WRONGTYPE"):
        await pool.release([Release("r0"), Release("r1")])
    await pool._make(Change([("DEL", key)]))
    await pool.release([Release("r0"), Release("r1")])

    assert await pool.usage.budgets("acme", [IN_FLIGHT]) == [0]


ODD_NAMES = ["a b", " a", 'a"b', "a\\b", "a\tb\n", "100% a", "ä\u00a0\u3000b", "a/requests/minute 7", "", "a" * 3000]


@pytest.mark.parametrize("model", ODD_NAMES)
async def test_a_limit_of_a_model_holds_and_is_given_back_whatever_the_model_is_called(
    pool: PoolStore, model: str
) -> None:
    limits = [
        Limit(Measure.REQUESTS, Period.IN_FLIGHT, 2, f"model:{model}"),
        replace(MINUTE_TOKENS, of=f"model:{model}"),
    ]
    at_a_time, tokens = budgets_of("acme", limits)
    drawn = [Draw(at_a_time, 1), Draw(tokens, 500)]

    # what is given back as its record says: nobody answered it, or its replica died
    for name in ("r1", "r2"):
        assert (await place_drawing(pool, name, *drawn)).status is PlaceStatus.DISPATCHED
    assert (await place_drawing(pool, "r3", *drawn)).status is PlaceStatus.LIMITED
    for name in ("r1", "r2"):
        await finish(pool, name)
    assert await pool.usage.budgets("acme", limits) == [0, 0]

    # between two tries its record has drawn nothing, and can still be read
    account = "acme ci - " + model
    told = await pool.place(
        placement("r4", draws=Draws.of(*drawn), drawn=drawn_text(Draws.of(*drawn)), account=account, tenant="acme")
    )
    assert told.status is PlaceStatus.DISPATCHED
    await finish(pool, "r4", used=KEPT)
    kept = await record(pool, "r4")
    assert (kept.drawn, kept.account) == ("", account)
    assert await pool.usage.budgets("acme", limits) == [0, 0]

    # a store that came back empty knows again what it drew
    await pool.adopt([replace(kept, request_id="r5", drawn=drawn_text(Draws.of(*drawn)))])
    assert [*map(round, await pool.usage.budgets("acme", limits))] == [1, 500]


async def test_a_request_that_is_tried_again_keeps_what_it_drew_and_nobody_gets_between(
    pool: PoolStore, clock: HandClock
) -> None:
    quota = Limit(Measure.REQUESTS, Period.DAY, 1)
    limits = [quota, MINUTE_TOKENS, IN_FLIGHT]
    drawn = Draws.of(*[Draw(each, cost) for each, cost in zip(budgets_of("acme", limits), (1, 5000, 1), strict=True)])
    about: dict[str, Any] = {
        "draws": drawn, "drawn": drawn_text(drawn), "tenant": "acme", "account": "acme ci - m", "tokens": 100,
    }  # fmt: skip
    assert (await pool.place(placement("r1", **about))).status is PlaceStatus.DISPATCHED

    # between its tries
    await finish(pool, "r1", replica_id="one", attempt=1, returned=nothing_of(drawn), used=KEPT)
    assert (await record(pool, "r1")).drawn == drawn_text(drawn)
    assert (await pool.place(placement("r2", **about))).status is PlaceStatus.LIMITED
    again = await pool.place(placement("r1", attempt=2, must_draw=True, **about))

    assert again.status is PlaceStatus.DISPATCHED
    assert again.drawn == Drawn((0, 1000, 1)), "it has drawn once"
    assert [*map(round, await pool.usage.budgets("acme", limits))] == [1, 5000, 1]

    # a day later it draws from that day's quota, and gives back nothing that it drew before
    await finish(pool, "r1", replica_id="one", attempt=2, returned=nothing_of(drawn), used=KEPT)
    clock.advance(86_400_000)
    late = await pool.place(placement("r1", attempt=3, must_draw=True, **about))
    assert late.status is PlaceStatus.DISPATCHED
    assert [*map(round, await pool.usage.budgets("acme", limits))] == [1, 5000, 1]
    await finish(pool, "r1", replica_id="one", attempt=3)
    assert [*map(round, await pool.usage.budgets("acme", limits))] == [0, 0, 0]

    # and one that is over between two tries gives back all
    await pool.place(placement("r3", **about))
    await finish(pool, "r3", replica_id="one", attempt=1, returned=nothing_of(drawn), used=KEPT)
    await finish(pool, "r3", replica_id="one", attempt=2, returned=drawn, used="1 0 0 0 1 0 0 refused reported")
    assert [*map(round, await pool.usage.budgets("acme", limits))] == [0, 0, 0]
