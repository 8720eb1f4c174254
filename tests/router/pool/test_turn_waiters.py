"""Turns that wait for memory on a replica."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dualmap.router.pool.grant_waiters import TurnedAwayError
from dualmap.router.pool.turn_waiters import TurnWaiters
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.runtime.clock import RealClock
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.machine import Refusal
from dualmap.scheduling.runs.turn import RunName, Turn
from dualmap.statestore.pool.runs import TurnStatus


class Ledger:
    """A pool that replies as a test says, and the turns that it was given."""

    name = "default"

    def __init__(self, *statuses: TurnStatus) -> None:
        self.statuses = list(statuses)
        self.admitted: list[list[str]] = []
        self.before_reply = lambda: None

    async def admit(self, turns: list[Turn], capacity_tokens: int) -> list[TurnStatus]:
        assert capacity_tokens == 700
        self.admitted.append([turn.turn_id for turn in turns])
        self.before_reply()
        await asyncio.sleep(0)
        return [self.statuses.pop(0) for _ in turns]


def waiters(ledger: Any) -> TurnWaiters:
    view: Any = SimpleNamespace(kv_capacity_tokens=700)
    loop = asyncio.get_running_loop()
    metrics = RouterMetrics(["default"]).pools["default"]
    return TurnWaiters(ledger, lambda: view, metrics, clock=RealClock(), call_later=loop.call_later)


def parked(found: TurnWaiters, class_name: str = "") -> float:
    return found._metrics.turns_of(class_name).parked.value


def turn(turn_id: str) -> Turn:
    return Turn(turn_id, "r", RunName("run"), Chain((1,), 100, 50), 4.0)


async def test_a_turn_that_goes_does_not_wait() -> None:
    found = waiters(Ledger(TurnStatus.GOES))

    await found.wait(turn("x"), 10.0)

    assert parked(found) == 0


async def test_a_turn_waits_for_the_message_that_it_goes() -> None:
    found = waiters(Ledger(TurnStatus.WAITS))
    waits = asyncio.ensure_future(found.wait(turn("x"), 10.0))
    await asyncio.sleep(0.01)
    assert parked(found) == 1

    found.goes("another")
    found.goes("x")
    await waits

    assert parked(found) == 0


async def test_turns_that_wait_are_counted_by_their_class() -> None:
    found = waiters(Ledger(TurnStatus.WAITS))
    waits = asyncio.ensure_future(found.wait(turn("x"), 10.0, "batch"))
    await asyncio.sleep(0.01)

    assert (parked(found, "batch"), parked(found)) == (1, 0)

    found.goes("x")
    await waits
    assert parked(found, "batch") == 0


async def test_a_message_may_overtake_the_reply_that_a_turn_waits() -> None:
    ledger = Ledger(TurnStatus.WAITS)
    found = waiters(ledger)
    ledger.before_reply = lambda: found.goes("x")

    await found.wait(turn("x"), 10.0)


async def test_a_turn_whose_message_got_lost_is_found_by_its_repetition() -> None:
    ledger = Ledger(TurnStatus.WAITS, TurnStatus.WAITS, TurnStatus.GOES, TurnStatus.WAITS)
    found = waiters(ledger)
    one, other = (asyncio.ensure_future(found.wait(turn(name), 10.0)) for name in ("x", "y"))
    await asyncio.sleep(0.01)

    await found.look_up()
    await one

    assert not other.done()
    assert ledger.admitted == [["x"], ["y"], ["x", "y"]]
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    assert parked(found) == 0
    await found.look_up()
    assert len(ledger.admitted) == 3, "nothing is repeated where nothing waits"


@pytest.mark.parametrize(
    ("status", "why"), [(TurnStatus.REFUSED, Refusal.TOO_MANY_TURNS), (TurnStatus.WAITS, Refusal.HELD_TOO_LONG)]
)
async def test_a_turn_is_turned_away(status: TurnStatus, why: Refusal) -> None:
    found = waiters(Ledger(status))

    with pytest.raises(TurnedAwayError) as turned_away:
        await found.wait(turn("x"), 0.01)

    assert turned_away.value.why is why
    assert parked(found) == 0
