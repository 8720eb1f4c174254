from __future__ import annotations

from itertools import product

import pytest

from scheduling.errors import TransitionError
from scheduling.request import Request, next_request_state
from scheduling.request import RequestEvent as Event
from scheduling.request import RequestState as State

EXPECTED = {
    #                 granted, migrated, first token
    State.HELD: ("dispatched", "held", None),
    State.DISPATCHED: (None, None, "prefilled"),
    State.PREFILLED: (None, None, None),
}
EVENTS = (Event.GRANTED, Event.MIGRATED, Event.FIRST_TOKEN)


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_event_in_every_state_is_decided(state: State, event: Event) -> None:
    expected = EXPECTED[state][EVENTS.index(event)]

    if expected is None:
        with pytest.raises(TransitionError, match=f"{state} cannot be {event}"):
            next_request_state(state, event)
    else:
        assert next_request_state(state, event) == expected


def test_a_request_takes_kv_memory_for_its_answer_too_and_its_deadline_counts_from_its_first_reservation() -> None:
    request = Request("r", "replica", "a", State.HELD, 2, 100, 900, 256, slo_ms=5000, enqueued_ms=1000)

    assert (request.context_tokens, request.deadline_ms) == (1156, 6000)
