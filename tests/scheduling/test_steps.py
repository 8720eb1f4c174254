"""One search, driven at once and with awaits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduling.steps import Steps, drive, drive_now


class Now:
    def double(self, number: int) -> int:
        return 2 * number


class Later:
    async def double(self, number: int) -> int:
        return 2 * number


class Broken:
    def __init__(self) -> None:
        self.asked: list[int] = []

    async def double(self, number: int) -> int:
        self.asked.append(number)
        if number > 0:
            raise ConnectionError("out of reach")
        return number


def asks(number: int) -> Callable[[Now], int]:
    return lambda fleet: fleet.double(number)


def twice_doubled(number: int) -> Steps[int]:
    once: int = yield asks(number)
    twice: int = yield asks(once)
    return twice


def recovered(number: int) -> Steps[str]:
    try:
        yield asks(number)
    except ConnectionError as error:
        yield asks(0)
        return str(error)
    return "not broken"


def nothing() -> Steps[str]:
    yield from ()
    return "done"


async def test_both_drivers_send_each_answer_back_and_return_the_result() -> None:
    assert drive_now(twice_doubled(3), Now()) == await drive(twice_doubled(3), Later()) == 12


async def test_steps_that_want_nothing_end_at_once() -> None:
    assert drive_now(nothing(), Now()) == await drive(nothing(), Later()) == "done"


async def test_an_error_of_the_fleet_is_raised_in_the_search_which_goes_on_from_it() -> None:
    fleet = Broken()

    assert await drive(recovered(1), fleet) == "out of reach"
    assert fleet.asked == [1, 0]


async def test_an_error_that_the_search_does_not_take_ends_it() -> None:
    with pytest.raises(ConnectionError, match="out of reach"):
        await drive(twice_doubled(1), Broken())
