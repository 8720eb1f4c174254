"""A store that lost a live request is given its record back."""

from __future__ import annotations

import pytest

from dualmap.scheduling.request.machine import ON_AN_INSTANCE, Arrived, Phase, Reserve, Reserved
from dualmap.scheduling.request.stored_request import stored_requests
from dualmap.scheduling.state.request import REPORTED_FIELDS, RequestState
from tests.scheduling.request.lives import Life, course_of, in_phase, member


@pytest.mark.parametrize("phase", list(Phase))
def test_a_request_has_a_record_in_each_phase_in_which_the_store_may_have_one(phase: Phase) -> None:
    life = in_phase(phase)
    reserved = phase in ON_AN_INSTANCE | {Phase.HELD, Phase.BROKEN_OFF}

    records = stored_requests(life.machine, 1000, life.now_s)

    assert bool(records) is reserved
    assert [each.state for each in records if each.state is RequestState.HELD] == [RequestState.HELD] * (
        phase is Phase.HELD
    )


@pytest.mark.parametrize("pinned_to", [None, "a"])
@pytest.mark.parametrize("held", [True, False])
def test_a_record_that_is_given_back_reports_what_was_placed(pinned_to: str | None, held: bool) -> None:
    life = Life(pinned_to=pinned_to, stored_tokens=9, expected_output_tokens=7)
    life.on(Arrived())
    (placing,) = [effect.search for effect in life.effects if isinstance(effect, Reserve)]
    life.on(Reserved(course_of(life.placed(held=held)), None if held else member("a")))

    (record,) = stored_requests(life.machine, 1234, life.now_s)

    assert {name: getattr(record, name) for name in REPORTED_FIELDS} == {
        name: getattr(placing.request, name) for name in REPORTED_FIELDS
    }
