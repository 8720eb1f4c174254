"""One search, driven at once and with awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

import pytest

from dualmap.scheduling.steps import Step, Steps, at_once, drive, drive_now
from dualmap.scheduling.values import value


class DoublingPort(Protocol):
    def double(self, number: int) -> Awaitable[int]: ...


@value
class Double(Step[DoublingPort, int]):
    number: int

    def on(self, port: DoublingPort) -> Awaitable[int]:
        return port.double(self.number)


class Now:
    async def double(self, number: int) -> int:
        return 2 * number


class Later:
    async def double(self, number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number


class Broken:
    def __init__(self) -> None:
        self.asked: list[int] = []

    async def double(self, number: int) -> int:
        self.asked.append(number)
        if number > 0:
            raise ConnectionError("out of reach")
        return number


def twice_doubled(number: int) -> Steps[DoublingPort, int]:
    once = yield from Double(number)
    return (yield from Double(once))


def recovered(number: int) -> Steps[DoublingPort, str]:
    try:
        yield from Double(number)
    except ConnectionError as error:
        yield from Double(0)
        return str(error)
    return "not broken"


def nothing() -> Steps[DoublingPort, str]:
    yield from ()
    return "done"


def test_a_step_is_a_frozen_value_of_its_arguments() -> None:
    assert Double(3) == Double(3) != Double(4)
    with pytest.raises(AttributeError):
        Double(3).number = 4


async def test_both_drivers_send_each_answer_back_and_return_the_result() -> None:
    assert drive_now(twice_doubled(3), Now()) == await drive(twice_doubled(3), Later()) == 12


async def test_steps_that_want_nothing_end_at_once() -> None:
    assert drive_now(nothing(), Now()) == await drive(nothing(), Later()) == "done"


async def test_an_error_of_the_port_is_raised_in_the_search_which_goes_on_from_it() -> None:
    port = Broken()

    assert await drive(recovered(1), port) == "out of reach"
    assert port.asked == [1, 0]


async def test_an_error_that_the_search_does_not_take_ends_it() -> None:
    with pytest.raises(ConnectionError, match="out of reach"):
        await drive(twice_doubled(1), Broken())


async def test_a_call_that_waits_has_no_result_at_once() -> None:
    with pytest.raises(RuntimeError, match="waits"):
        at_once(Later().double(1))


def test_a_step_by_hand() -> None:
    steps = twice_doubled(3)
    assert next(steps) == Double(3)
    assert steps.send(6) == Double(6)
