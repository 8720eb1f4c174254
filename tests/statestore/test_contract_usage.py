"""The store contract: what requests of tenants used, on every backend."""

from __future__ import annotations

import asyncio
from datetime import date

import pytest

from dualmap.scheduling.placing.placement import PlaceReply, PlaceStatus
from dualmap.scheduling.request.charge import Charge
from dualmap.scheduling.request.metering import KEPT, LOST, Account, Counts, used_by
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.state.legs import Leg, decode_leg_id
from dualmap.scheduling.tenants.budgets import Budget, Draw, Draws, Limit, Measure, Period, drawn_text
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.usage import USAGE_DAYS
from tests.statestore.samples import HandClock, finish, first_token, instance, lead, placement

ACME = Account("acme", "ci", "", "qwen 7b")
OTHER = Account("other", "web", "batch", "qwen 7b")
DAY_MS = 86_400_000


def used(prompt: int = 100, cached: int = 64, output: int = 20) -> str:
    return used_by(Outcome.COMPLETED, Charge(prompt, output, cached, reported=True))


async def place(pool: PoolStore, request_id: str, account: Account = ACME, **about: object) -> PlaceReply:
    return await pool.place(placement(request_id, tokens=100, tenant=account.tenant, account=str(account), **about))


async def counts_of(pool: PoolStore) -> dict[Account, Counts]:
    return dict(await pool.usage.of_day(await pool.usage.today()))


@pytest.fixture(autouse=True)
async def members(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=100_000, max_running_requests=1000))


async def test_a_request_is_metered_by_its_end_and_once(pool: PoolStore, clock: HandClock) -> None:
    await place(pool, "r1")
    await finish(pool, "r1", used=used())
    await finish(pool, "r1", used=used())

    assert await counts_of(pool) == {ACME: Counts(1, 100, 64, 20)}
    ((_, record),) = await pool.usage.records("0", 10)
    assert (record.request_id, record.account, record.ended_ms) == ("r1", ACME, clock())
    assert (record.counts, record.outcome, record.reported) == (Counts(1, 100, 64, 20), "completed", True)


async def test_requests_that_end_in_one_call_are_metered_each_by_itself_and_added_up(pool: PoolStore) -> None:
    await place(pool, "before")
    await finish(pool, "before", used=used())
    for name, account in (("r1", ACME), ("r2", OTHER), ("r3", ACME)):
        await place(pool, name, account)

    await pool.release([Release(name, used=used()) for name in ("r1", "r2", "r3", "r1")])

    assert await counts_of(pool) == {ACME: Counts(3, 300, 192, 60), OTHER: Counts(1, 100, 64, 20)}
    logged = [(record.request_id, record.account) for _, record in await pool.usage.records("0", 10)]
    assert logged == [("before", ACME), ("r1", ACME), ("r2", OTHER), ("r3", ACME)]


async def test_accounts_add_up_by_themselves_and_day_by_day_in_utc(pool: PoolStore, clock: HandClock) -> None:
    clock.now_ms = 1_772_323_199_999  # the last millisecond of February 2026
    for number, account in enumerate((ACME, ACME, OTHER)):
        await place(pool, f"r{number}", account)
        await finish(pool, f"r{number}", used=used(output=number))
    clock.advance(1)
    await place(pool, "next", ACME)
    await finish(pool, "next", used=used())

    assert await pool.usage.of_day(date(2026, 2, 28)) == {ACME: Counts(2, 200, 128, 1), OTHER: Counts(1, 100, 64, 2)}
    assert await pool.usage.of_day(date(2026, 3, 1)) == {ACME: Counts(1, 100, 64, 20)}
    assert await pool.usage.today() == date(2026, 3, 1)


@pytest.mark.parametrize(
    "day", [date(1999, 12, 31), date(2000, 2, 29), date(2024, 2, 29), date(2027, 1, 1), date(2100, 3, 1)]
)
async def test_every_day_of_the_calendar_has_its_own_name(pool: PoolStore, clock: HandClock, day: date) -> None:
    clock.now_ms = (day - date(1970, 1, 1)).days * DAY_MS + 1
    await place(pool, "r1")
    await finish(pool, "r1", used=used())

    assert list(await pool.usage.of_day(day)) == [ACME]


async def test_an_end_that_is_not_for_good_meters_nothing(pool: PoolStore) -> None:
    await place(pool, "r1")
    await first_token(pool, "r1", "a")
    await finish(pool, "r1")

    assert await counts_of(pool) == {}


async def test_nobody_pays_for_requests_without_a_tenant(pool: PoolStore) -> None:
    await pool.place(placement("r1", tokens=100))
    await finish(pool, "r1", used=used())

    assert (await counts_of(pool), await pool.usage.records("0", 10)) == ({}, [])


async def test_what_a_limit_refuses_is_counted_beside(pool: PoolStore) -> None:
    limit = Limit(Measure.REQUESTS, Period.IN_FLIGHT, 1)
    draws = Draws.of(Draw(Budget("acme/requests/in_flight", limit), 1))
    for request_id in ("r1", "r2", "r3"):
        reply = await place(pool, request_id, draws=draws, drawn=drawn_text(draws))

    assert reply.status is PlaceStatus.LIMITED
    assert await counts_of(pool) == {ACME: Counts(refused=2)}


async def test_a_request_that_was_not_answered_used_nothing(pool: PoolStore) -> None:
    await place(pool, "r1")
    await finish(pool, "r1", used=used_by(Outcome.UPSTREAM_FAILED, None))

    assert await counts_of(pool) == {ACME: Counts(1, unanswered=1)}


async def test_requests_of_a_dead_replica_are_metered_with_what_is_known(pool: PoolStore, clock: HandClock) -> None:
    fence = await lead(pool)
    await pool.heartbeat("one", 1000, {})
    for request_id in ("answers", "waits"):
        await place(pool, request_id)
    await first_token(pool, "answers", "a")
    await pool.place(placement("split", tokens=100, account=str(OTHER), leg=Leg.PREFILL))
    await pool.place(placement(decode_leg_id("split"), tokens=100, account=str(OTHER), leg=Leg.DECODE))
    clock.advance(1001)

    for _ in range(2):
        await pool.upkeep.reap("one", fence=fence)

    assert await counts_of(pool) == {ACME: Counts(2, 100, lost=2), OTHER: Counts(1, lost=1)}
    records = [record for _, record in await pool.usage.records("0", 10)]
    assert {(each.outcome, each.reported) for each in records} == {(LOST, False)}


async def test_a_split_request_is_metered_once_whichever_leg_ends_last(pool: PoolStore) -> None:
    legs = ("r1", decode_leg_id("r1"))
    for request_id in legs:
        await place(pool, request_id)
    await pool.release([Release(legs[1]), Release(legs[0], used=used())])

    assert await counts_of(pool) == {ACME: Counts(1, 100, 64, 20)}


async def try_over(pool: PoolStore, request_id: str = "r1", attempt: int = 1) -> None:
    await finish(pool, request_id, replica_id="one", attempt=attempt, used=KEPT)


async def test_a_request_that_is_refused_between_two_tries_is_metered_once(pool: PoolStore) -> None:
    await place(pool, "r1", draws=IN_FLIGHT, drawn=drawn_text(IN_FLIGHT))
    for _ in range(2):
        await try_over(pool)
    assert await counts_of(pool) == {}
    (kept,) = await pool.requests_of("one")
    assert (kept.instance_id, kept.drawn) == ("", "")
    load = (await pool.loads())["a"]
    assert (load.running_requests, load.pending_tokens, load.context_tokens) == (0, 0, 0)
    assert await pool.usage.budgets("acme", [ONE_LIMIT]) == [0]

    refused = used_by(Outcome.UPSTREAM_FAILED, None)
    for _ in range(2):
        await finish(pool, "r1", replica_id="one", attempt=2, used=refused)

    assert await counts_of(pool) == {ACME: Counts(1, unanswered=1)}
    assert await pool.requests_of("one") == []
    assert await pool.usage.budgets("acme", [ONE_LIMIT]) == [0]


async def test_the_next_try_takes_the_record_over(pool: PoolStore) -> None:
    await place(pool, "r1")
    await try_over(pool)

    assert (await place(pool, "r1", attempt=2)).status is PlaceStatus.DISPATCHED
    await try_over(pool)  # late
    (again,) = await pool.requests_of("one")
    assert (again.instance_id, again.attempt) == ("a", 2)
    await first_token(pool, "r1", "a")
    for _ in range(2):
        await finish(pool, "r1", replica_id="one", attempt=2, used=used())

    assert await counts_of(pool) == {ACME: Counts(1, 100, 64, 20)}
    assert await pool.requests_of("one") == []


async def test_a_kept_record_is_taken_over_by_later_tries_of_its_replica_alone(pool: PoolStore) -> None:
    await place(pool, "r1", attempt=2)
    await try_over(pool, attempt=2)

    for about in ({"replica_id": "two", "attempt": 3}, {"attempt": 1}):
        assert (await place(pool, "r1", **about)).status is PlaceStatus.DUPLICATE
    assert not (await finish(pool, "r1", replica_id="two", used=used())).done
    assert not (await finish(pool, "r1", replica_id="one", attempt=1, used=used())).done

    assert await counts_of(pool) == {}


async def test_a_held_request_is_kept_too(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=100, max_running_requests=1))
    await place(pool, "before")
    assert (await place(pool, "r1")).status is PlaceStatus.HELD

    await try_over(pool)

    load = (await pool.loads())["a"]
    assert (load.queued_requests, load.pending_tokens) == (0, 100), "that of the one before"
    assert (await place(pool, "r1", attempt=2)).status is PlaceStatus.HELD
    assert len([each for each in await pool.requests_of("one") if each.request_id == "r1"]) == 1


async def test_a_replica_that_dies_between_two_tries_leaves_a_request_that_is_metered(
    pool: PoolStore, clock: HandClock
) -> None:
    fence = await lead(pool)
    await pool.heartbeat("one", 1000, {})
    await place(pool, "r1")
    await try_over(pool)
    clock.advance(1001)

    for _ in range(2):
        await pool.upkeep.reap("one", fence=fence)

    assert await counts_of(pool) == {ACME: Counts(1, lost=1)}
    assert await pool.requests_of("one") == []


async def test_of_a_split_answer_whose_replica_dies_the_prompt_is_metered_once(
    pool: PoolStore, clock: HandClock
) -> None:
    fence = await lead(pool)
    await pool.heartbeat("one", 1000, {})
    await place(pool, "r1", leg=Leg.PREFILL)
    await first_token(pool, "r1", "a")
    await place(pool, decode_leg_id("r1"), leg=Leg.DECODE)
    await try_over(pool)
    clock.advance(1001)

    await pool.upkeep.reap("one", fence=fence)

    assert await counts_of(pool) == {ACME: Counts(1, 100, lost=1)}


async def test_requests_of_a_replica_that_was_taken_for_dead_count_once(pool: PoolStore, clock: HandClock) -> None:
    fence = await lead(pool)
    await pool.heartbeat("one", 1000, {})
    for request_id in ("goes on", "other", "third"):
        await place(pool, request_id)
    live = [each for each in await pool.requests_of("one") if each.request_id != "third"]
    clock.advance(1001)
    await pool.upkeep.reap("one", fence=fence)
    assert await counts_of(pool) == {ACME: Counts(3, lost=3)}

    assert await pool.adopt(live) == 2
    assert await pool.adopt(live) == 0
    assert await counts_of(pool) == {ACME: Counts(1, lost=1)}
    await finish(pool, "goes on", used=used())
    await finish(pool, "other", used=used())

    assert await counts_of(pool) == {ACME: Counts(3, 200, 128, 40, lost=1)}
    records = [each for _, each in await pool.usage.records("0", 10)]
    assert sum([each.counts for each in records], Counts()) == Counts(3, 200, 128, 40, lost=1), "the log says the same"


async def test_nothing_is_kept_of_a_request_without_a_tenant(pool: PoolStore) -> None:
    await pool.place(placement("r1", tokens=100))
    await try_over(pool)

    assert await pool.requests_of("one") == []


async def test_many_replicas_at_once_lose_no_count(pool: PoolStore) -> None:
    await asyncio.gather(*[place(pool, f"r{number}") for number in range(100)])
    await asyncio.gather(*[finish(pool, f"r{number}", used=used()) for number in range(100)] * 2)

    assert await counts_of(pool) == {ACME: Counts(100, 10_000, 6400, 2000)}


async def test_the_log_is_read_page_by_page(pool: PoolStore) -> None:
    for number in range(5):
        await place(pool, f"r{number}")
        await finish(pool, f"r{number}", used=used())

    first = await pool.usage.records("0", 3)
    rest = await pool.usage.records(first[-1][0], 3)

    assert [record.request_id for _, record in (*first, *rest)] == ["r0", "r1", "r2", "r3", "r4"]


@pytest.mark.parametrize("text", ["nonsense", "1 2 3", ""])
async def test_counts_that_somebody_damaged_begin_anew(pool: PoolStore, text: str) -> None:
    day = await pool.usage.today()
    await pool._calls.command("HSET", pool._keys.usage(day.isoformat()), str(ACME), text)
    await pool._calls.command("HSET", pool._keys.usage(day.isoformat()), "no account", "1 1 1 1 1 1 1")
    await place(pool, "r1")
    await finish(pool, "r1", used=used())

    assert await counts_of(pool) == {ACME: Counts(1, 100, 64, 20)}


async def test_the_leader_drops_days_that_nobody_needs_any_more(pool: PoolStore, clock: HandClock) -> None:
    first = await pool.usage.today()
    await place(pool, "r1")
    await finish(pool, "r1", used=used())
    fence = await lead(pool)

    clock.advance((USAGE_DAYS - 1) * DAY_MS)
    fence = await lead(pool)
    await pool.usage.drop_old(fence=fence)
    assert await pool.usage.of_day(first) != {}

    clock.advance(DAY_MS)
    fence = await lead(pool)
    await pool.usage.drop_old(fence=fence)
    assert await pool.usage.of_day(first) == {}


# requests that are passed on -------------------------------------------------------------------------------------
ONE_LIMIT = Limit(Measure.REQUESTS, Period.IN_FLIGHT, 2)
IN_FLIGHT = Draws.of(Draw(Budget("acme/requests/in_flight", ONE_LIMIT), 1))


async def register(pool: PoolStore, request_id: str, replica_id: str = "one", account: str = str(ACME)) -> PlaceStatus:
    about = {"account": account, "tenant": "acme", "drawn": drawn_text(IN_FLIGHT), "replica_id": replica_id}
    status, _ = await pool.register(placement(request_id, **about).request, IN_FLIGHT)
    return status


async def test_a_request_that_is_passed_on_draws_gives_back_and_is_metered(pool: PoolStore) -> None:
    statuses = [await register(pool, f"r{number}") for number in range(3)]
    assert statuses == [PlaceStatus.DISPATCHED, PlaceStatus.DISPATCHED, PlaceStatus.LIMITED]
    assert [each.request_id for each in await pool.requests_of("one")] == ["r0", "r1"]

    assert (await finish(pool, "r0", used=used_by(Outcome.COMPLETED, Charge(0, 0)))).done
    assert not (await finish(pool, "r0", used=used_by(Outcome.COMPLETED, Charge(0, 0)))).done

    assert await register(pool, "r3") is PlaceStatus.DISPATCHED
    assert await counts_of(pool) == {ACME: Counts(1, refused=1)}


async def test_a_call_that_belongs_to_no_account_is_not_metered_even_if_it_is_refused(pool: PoolStore) -> None:
    statuses = [await register(pool, f"r{number}", account="") for number in range(3)]
    assert statuses[-1] is PlaceStatus.LIMITED

    assert not await pool._calls.command("HKEYS", pool._keys.usage((await pool.usage.today()).isoformat()))


async def test_a_repetition_is_admitted_once_and_the_id_of_another_is_taken(pool: PoolStore) -> None:
    for _ in range(3):
        assert await register(pool, "r1") is PlaceStatus.DISPATCHED

    assert await register(pool, "r1", "two") is PlaceStatus.DUPLICATE
    assert (await pool.place(placement("r1", replica_id="two"))).status is PlaceStatus.DUPLICATE
    assert await register(pool, "r2") is PlaceStatus.DISPATCHED, "one was drawn"


async def test_what_a_dead_replica_passed_on_is_reaped(pool: PoolStore, clock: HandClock) -> None:
    fence = await lead(pool)
    await pool.heartbeat("one", 1000, {})
    await register(pool, "r1")
    clock.advance(1001)

    assert await pool.upkeep.reap("one", fence=fence) == 1

    assert await counts_of(pool) == {ACME: Counts(1, lost=1)}
    assert await pool.requests_of("one") == []
    assert [await register(pool, f"new-{number}") for number in range(2)] == [PlaceStatus.DISPATCHED] * 2
