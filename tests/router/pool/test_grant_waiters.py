"""Requests that wait for their grant: grants told, grants looked up, patience that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dualmap.router.pool.grant_waiters import GrantWaiters, ReservationLostError, TurnedAwayError
from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.queues.granting import Grant, grant_queue
from dualmap.scheduling.queues.leader_jobs import sweep_queue
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.request.machine import Refusal
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import drive
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools
from tests.statestore.samples import finish, first_token

ORDER = QueueOrder(by_deadline=False, max_deferred_s=30.0)


def waiters_of(pool: Any, clock: Any, *, refuses_late: bool = False) -> GrantWaiters:
    return GrantWaiters(
        pool,
        replica_id="replica-1",
        clock=clock,
        call_later=clock.call_later,
        order=ORDER,
        refuses_late=refuses_late,
    )


def held_record(request_id: str) -> StoredRequest:
    return StoredRequest(
        request_id,
        "replica-1",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=100,
        prompt_tokens=100,
        expected_output_tokens=256,
        slo_ms=5000,
    )


def granted(request_id: str, attempt: int, *, instance_id: str = "a") -> Grant:
    return Grant(request_id, instance_id, "replica-1", attempt, 100)


async def held(pool: Any, *request_ids: str) -> None:
    """Fill the instance by one request, and let the others be held for it."""
    for request_id in ("first", *request_ids):
        await pool.place(tools.placement(request_id, tokens=1200))


async def release(pool: Any, request_id: str) -> None:
    """Finish a request, and grant what its instance has room for."""
    told = await finish(pool, request_id)
    await drive(grant_queue(told.queue, ORDER), pool)


async def test_a_grant_before_the_wait_is_there_when_the_wait_begins(clock: Any) -> None:
    waiters = waiters_of(None, clock)
    waiter = waiters.expect("x", 1)

    waiters.deliver(granted("x", 1))

    assert (await waiters.wait(waiter, 10.0)).instance_id == "a"


async def test_a_grant_of_another_attempt_is_not_taken(clock: Any) -> None:
    waiters = waiters_of(None, clock)
    waiter = waiters.expect("x", 2)
    task = asyncio.create_task(waiters.wait(waiter, 10.0))

    waiters.deliver(granted("x", 1))
    await tools.settle()
    assert not task.done()
    waiters.deliver(granted("x", 2, instance_id="b"))

    assert (await task).instance_id == "b"


async def test_a_grant_is_waited_for_as_long_as_the_request_may_be_held(clock: Any) -> None:
    waiters = waiters_of(None, clock)
    task = asyncio.create_task(waiters.wait(waiters.expect("x", 1), 0.5))

    await clock.advance(0.6)

    with pytest.raises(TurnedAwayError) as refused:
        await task
    assert refused.value.why is Refusal.HELD_TOO_LONG


async def test_all_held_requests_are_looked_up_in_one_call(store: Any, clock: Any) -> None:
    tampered = tools.Tampered(store)
    pool = tampered.pool("default")
    await pool.members.put_instance(tools.spec("a"))
    await held(pool, "x", "y", "z")
    waiters = waiters_of(pool, clock)
    tasks = [asyncio.create_task(waiters.wait(waiters.expect(name, 1), 10.0)) for name in "xyz"]
    await tools.settle()
    tampered.calls.clear()

    await waiters.look_up()
    assert tampered.calls == ["records"]
    assert not any(task.done() for task in tasks)
    await release(pool, "first")
    await waiters.look_up()

    assert (await tasks[0]).request_id == "x"
    for task in tasks[1:]:
        task.cancel()


async def test_however_many_are_held_one_look_up_asks_for_so_many_and_each_has_its_turn(
    store: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualmap.router.pool.grant_waiters.LOOKED_UP", 2)
    asked: list[list[str]] = []

    class Pool:
        name = "default"

        async def records(self, names: list[str]) -> dict[str, StoredRequest]:
            asked.append(names)
            return {name: held_record(name) for name in names}

    waiters = waiters_of(Pool(), clock)
    tasks = [asyncio.create_task(waiters.wait(waiters.expect(name, 1), 10.0)) for name in "abcde"]
    await tools.settle()

    for _ in range(3):
        await waiters.look_up()

    assert asked == [["a", "b"], ["c", "d"], ["e", "a"]]
    for task in tasks:
        task.cancel()


async def test_nothing_is_asked_while_nobody_is_held(store: Any, clock: Any) -> None:
    tampered = tools.Tampered(store)
    waiters = waiters_of(tampered.pool("default"), clock)
    waiters.expect("not yet held", 1)

    await waiters.look_up()

    assert tampered.calls == []


async def test_a_request_that_the_store_does_not_know_is_lost(store: Any, clock: Any) -> None:
    waiters = waiters_of(store.pool("default"), clock)
    task = asyncio.create_task(waiters.wait(waiters.expect("x", 1), 10.0))
    await tools.settle()

    await waiters.look_up()

    with pytest.raises(ReservationLostError):
        await task


async def test_a_request_whose_id_is_another_replicas_by_now_is_lost(store: Any, clock: Any) -> None:
    pool = store.pool("default")
    await pool.members.put_instance(tools.spec("a"))
    await pool.place(tools.placement("x", replica_id="another"))
    waiters = waiters_of(pool, clock)
    task = asyncio.create_task(waiters.wait(waiters.expect("x", 1), 10.0))
    await tools.settle()

    await waiters.look_up()

    with pytest.raises(ReservationLostError):
        await task


async def test_leaving_removes_only_ones_own_entry(clock: Any) -> None:
    waiters = waiters_of(None, clock)
    old = waiters.expect("x", 1)
    new = waiters.expect("x", 2)

    waiters.leave(old)
    waiters.deliver(granted("x", 2))

    assert (await new.grant()).attempt == 2


class Records:
    """A pool that knows one held request, which was deferred."""

    def __init__(self, attempt: int, *, deferred: bool = True) -> None:
        self._record = StoredRequest(
            "x",
            "replica-1",
            "a",
            RequestState.HELD,
            attempt,
            uncached_tokens=1200,
            prompt_tokens=1200,
            expected_output_tokens=10,
            slo_ms=5000,
            deferred=deferred,
        )

    async def records(self, request_ids: Sequence[str]) -> dict[str, StoredRequest]:
        return {"x": self._record}


@pytest.mark.parametrize(("refuses_late", "attempt", "refused"), [(True, 1, True), (True, 2, False), (False, 1, False)])
async def test_a_deferred_request_is_refused_where_late_ones_are_and_nothing_was_tried_yet(
    clock: Any, refuses_late: bool, attempt: int, refused: bool
) -> None:
    waiters = waiters_of(Records(attempt), clock, refuses_late=refuses_late)
    task = asyncio.create_task(waiters.wait(waiters.expect("x", attempt), 10.0))
    await tools.settle()

    await waiters.look_up()
    await tools.settle()

    assert task.done() is refused
    if refused:
        with pytest.raises(TurnedAwayError) as turned_away:
            await task
        assert turned_away.value.why is Refusal.IS_LATE
    task.cancel()


@pytest.mark.parametrize(
    ("deferred", "attempt", "after_s", "refused"),
    [(True, 1, 7.0, True), (True, 1, 6.9, False), (True, 2, 7.0, False), (False, 1, 7.0, False)],
)
async def test_a_request_that_is_deferred_for_too_long_is_refused_even_where_late_ones_are_served(
    clock: Any, deferred: bool, attempt: int, after_s: float, refused: bool
) -> None:
    """With an SLO of 5 s, 2 s past its deadline. A retry was let in before, and has
    lost an instance already."""
    waiters = waiters_of(Records(attempt, deferred=deferred), clock)
    waiters.order = QueueOrder(by_deadline=True, max_deferred_s=2.0)
    task = asyncio.create_task(waiters.wait(waiters.expect("x", attempt), 10.0))
    await tools.settle()
    clock.now_s += after_s

    await waiters.look_up()
    await tools.settle()

    assert task.done() is refused
    if refused:
        with pytest.raises(TurnedAwayError) as turned_away:
            await task
        assert turned_away.value.why is Refusal.LATE_FOR_TOO_LONG
    task.cancel()


async def test_a_grant_before_the_reservations_own_answer_is_there_when_the_request_waits(clock: Any) -> None:
    waiters = waiters_of(None, clock)
    waiters.placing["x"] = None

    waiters.deliver(granted("x", 1))
    waiters.deliver(granted("unknown", 1))

    assert (await waiters.wait(waiters.expect("x", 1), 10.0)).instance_id == "a"
    assert list(waiters.placing) == ["x"], "a grant of a request that is over is not kept"


async def test_an_early_grant_of_another_attempt_is_not_taken(clock: Any) -> None:
    waiters = waiters_of(None, clock)
    waiters.placing["x"] = None
    waiters.deliver(granted("x", 1))

    task = asyncio.create_task(waiters.wait(waiters.expect("x", 2), 10.0))
    await tools.settle()

    assert not task.done()
    task.cancel()


async def test_a_plan_that_could_not_be_committed_fails_nothing_as_the_leaders_sweep_plans_that_queue(
    store: Any, clock: Any
) -> None:
    tampered, pool = tools.Tampered(store), store.pool("default")
    await pool.members.put_instance(tools.spec("a"))
    waiters = waiters_of(tampered.pool("default"), clock)
    await pool.place(tools.placement("first", tokens=1200))
    held_back = await pool.place(tools.placement("left behind", tokens=100))
    assert held_back.status is PlaceStatus.HELD
    told = await first_token(pool, "first", "a")

    async def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailableError("just now")

    tampered.before["commit"] = away
    await waiters.plan(told.queue)

    assert tampered.calls == ["commit"]
    assert await drive(sweep_queue("a", ORDER), pool) == 1


async def test_a_grant_of_its_own_request_comes_with_the_reply_to_the_plan(store: Any, clock: Any) -> None:
    pool = store.pool("default")
    await pool.members.put_instance(tools.spec("a"))
    waiters = waiters_of(pool, clock)
    await held(pool, "mine", "theirs")
    told = await finish(pool, "first")
    waiter = waiters.expect("mine", 1)

    await waiters.plan(told.queue)

    assert (await waiters.wait(waiter, 10.0)).request_id == "mine"
