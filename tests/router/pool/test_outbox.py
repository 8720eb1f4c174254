"""Releases on their way to the store."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from dualmap.router.pool.outbox import TOGETHER, Outbox
from dualmap.scheduling.queues.queue_order import QueueHead
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.statestore.call_values import Transition
from dualmap.statestore.errors import StoreError, StoreUnavailableError
from tests.router import tools


def queue_head(instance_id: str) -> QueueHead:
    return QueueHead(0, InstanceLoad(instance_id, InstanceState.READY), ())


class Fleet:
    """Notes what is delivered to it, and fails as it is told to."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.tries: list[list[str]] = []
        self.delivered: list[str] = []
        self.planned: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def plan(self, queue: QueueHead) -> None:
        self.planned.append(queue.load.instance_id)

    async def release(self, releases: Sequence[Release]) -> list[Transition]:
        names = [release.request_id for release in releases]
        self.tries.append(names)
        await self.goes_on.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.delivered += names
        return [Transition(True, queue_head(each.instance_id) if each.instance_id else None) for each in releases]


def delivering(outbox: Outbox) -> asyncio.Task[None]:
    return asyncio.create_task(outbox.run())


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_releases_are_delivered_in_the_order_in_which_they_were_posted_so_many_at_a_time(clock: Any) -> None:
    fleet = Fleet()
    outbox, names = Outbox(fleet.release, fleet.plan, clock=clock), [f"r{number}" for number in range(TOGETHER + 1)]
    task = delivering(outbox)

    for name in names:
        outbox.post(Release(name))

    await outbox.flush()
    assert fleet.tries == [names[:TOGETHER], names[TOGETHER:]]
    await stopped(task)


async def test_queues_that_have_room_by_a_release_are_planned(clock: Any) -> None:
    fleet = Fleet()
    outbox = Outbox(fleet.release, fleet.plan, clock=clock)
    task = delivering(outbox)

    outbox.post(Release("r1", "a"))
    outbox.post(Release("r2"))
    await outbox.flush()
    await outbox.release([Release("r3", "b")])

    assert fleet.planned == ["a", "b"]
    await stopped(task)


async def test_what_is_posted_while_a_delivery_is_under_way_shares_the_next(clock: Any) -> None:
    fleet = Fleet()
    fleet.goes_on.clear()
    outbox = Outbox(fleet.release, fleet.plan, clock=clock)
    task = delivering(outbox)
    for name in "abc":
        outbox.post(Release(name))
        await tools.settle()

    fleet.goes_on.set()

    await outbox.flush()
    assert fleet.tries == [["a"], ["b", "c"]]
    await stopped(task)


async def test_those_that_find_the_store_away_are_repeated_until_they_get_through(clock: Any) -> None:
    fleet, at_s = Fleet(*[StoreUnavailableError("away")] * 3), []

    async def release(releases: Sequence[Release]) -> list[Transition]:
        at_s.append(clock.now_s)
        return await fleet.release(releases)

    outbox = Outbox(release, fleet.plan, clock=clock)
    task = delivering(outbox)
    outbox.post(Release("a"))
    await clock.advance(10.0)

    assert fleet.tries == [["a"]] * 4
    gaps = [later - earlier for earlier, later in itertools.pairwise(at_s)]
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[-1]
    await outbox.flush()
    await stopped(task)


async def test_what_is_refused_does_not_stop_the_others(clock: Any) -> None:
    fleet = Fleet(StoreError("never"), ValueError("a bug"))
    outbox = Outbox(fleet.release, fleet.plan, clock=clock)
    task = delivering(outbox)
    for name in ("refused", "broken", "sound"):
        outbox.post(Release(name))
        await tools.settle()

    await outbox.flush()
    assert fleet.delivered == ["sound"]
    await stopped(task)


async def test_one_that_is_refused_takes_no_others_of_its_delivery_with_it(clock: Any) -> None:
    fleet, told = Fleet(StoreError("one of them cannot be"), StoreUnavailableError("away"), StoreError("never")), []
    outbox = Outbox(fleet.release, fleet.plan, clock=clock)
    for name in "abc":
        outbox.post(Release(name), lambda name=name: told.append(name))
    task = delivering(outbox)
    await clock.advance(1.0)

    await outbox.flush()
    assert fleet.tries == [["a", "b", "c"], ["a"], ["a"], ["b"], ["c"]]
    assert (fleet.delivered, told) == (["b", "c"], ["a", "b", "c"])
    await stopped(task)


async def test_a_full_outbox_drops_and_counts_and_never_waits(clock: Any) -> None:
    outbox = Outbox(Fleet().release, Fleet().plan, limit=2, clock=clock)

    for number in range(5):
        outbox.post(Release(f"r{number}"))

    assert (len(outbox), outbox.dropped.value) == (2, 3)


async def test_a_delivery_that_was_stopped_leaves_the_next_ones_work(clock: Any) -> None:
    fleet = Fleet()
    outbox = Outbox(fleet.release, fleet.plan, clock=clock)
    former = delivering(outbox)
    await asyncio.sleep(0)  # it waits for work
    await stopped(former)

    task = delivering(outbox)
    await asyncio.sleep(0)
    outbox.post(Release("a"))

    await outbox.flush()
    assert fleet.delivered == ["a"]
    await stopped(task)


async def test_a_caller_is_told_once_when_its_transition_was_delivered_refused_or_dropped(clock: Any) -> None:
    fleet, told = Fleet(StoreError("no")), []
    outbox = Outbox(fleet.release, fleet.plan, limit=1, clock=clock)
    task = delivering(outbox)
    for name in ("refused", "delivered"):
        outbox.post(Release(name), lambda name=name: told.append((name, len(fleet.tries))))
        await tools.settle()
    await stopped(task)
    outbox.post(Release("waits"))

    outbox.post(Release("dropped"), lambda: told.append(("dropped", len(fleet.tries))))

    assert told == [("refused", 1), ("delivered", 2), ("dropped", 2)]
