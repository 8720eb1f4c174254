"""Deadlines are reported when they pass, and keep nothing of a request that has been judged."""

from __future__ import annotations

import gc
import weakref

from dualmap.router.requests.deadlines import Deadlines
from tests.support.manual_clock import ManualClock


class Request:
    def __init__(self) -> None:
        self.heard = 0

    def deadline_passed(self) -> None:
        self.heard += 1


async def test_each_is_reported_once_as_it_passes_by_one_timer() -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock, clock.call_later)
    late, soon, soonest = Request(), Request(), Request()
    deadlines.watch(late, clock.now_s + 9.0)
    deadlines.watch(soon, clock.now_s + 5.0)
    deadlines.watch(soonest, clock.now_s + 1.0)

    await clock.advance(1.1)
    assert (soonest.heard, soon.heard, late.heard) == (1, 0, 0)
    await clock.advance(4.0)
    assert (soonest.heard, soon.heard, late.heard) == (1, 1, 0)
    await clock.advance(600.0)
    assert (soonest.heard, soon.heard, late.heard) == (1, 1, 1)
    assert len(deadlines) == 0


async def test_a_reader_has_what_has_passed_by_now_before_the_timer_fires() -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock, clock.call_later)
    request = Request()
    deadlines.watch(request, clock.now_s + 5.0)

    clock.jump(5.0)
    deadlines.report()
    assert request.heard == 1
    await clock.advance(60.0)
    assert request.heard == 1


async def test_one_that_is_forgotten_is_not_reported_and_keeps_nothing() -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock, clock.call_later)
    request = Request()
    kept = weakref.ref(request)
    deadlines.watch(request, clock.now_s + 3600.0).forget()

    del request
    gc.collect()
    assert kept() is None


async def test_deadlines_that_are_far_away_do_not_pile_up_behind_requests_that_are_over() -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock, clock.call_later)
    waiting = Request()
    deadlines.watch(waiting, clock.now_s + 5.0)

    for _ in range(20_000):
        deadlines.watch(Request(), clock.now_s + 86_400.0).forget()

    assert len(deadlines) <= 4097
    await clock.advance(5.1)
    assert waiting.heard == 1
