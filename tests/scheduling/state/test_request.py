from __future__ import annotations

from itertools import product

import pytest

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.state.request import Counts, StoredRequest, next_request_state
from dualmap.scheduling.state.request import RequestEvent as Event
from dualmap.scheduling.state.request import RequestState as State

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


def request(state: State, *, deferred: bool = False) -> StoredRequest:
    return StoredRequest("r", "replica", "a", state, 2, 100, 900, 256, slo_ms=5000, enqueued_ms=1000, deferred=deferred)


def test_a_request_takes_kv_memory_for_its_answer_too() -> None:
    assert request(State.HELD).context_tokens == 1156


def test_its_instance_counts_it_by_its_state() -> None:
    lives = (
        request(State.HELD),
        request(State.HELD, deferred=True),
        request(State.DISPATCHED),
        request(State.PREFILLED),
    )

    assert [each.counts for each in lives] == [
        (100, 0, 0, 0, 1, 0),
        (100, 0, 100, 0, 1, 0),
        (100, 100, 0, 1156, 0, 1),
        (0, 0, 0, 1156, 0, 1),
    ]
    assert Counts.sum(lives) == Counts(300, 100, 100, 2312, 2, 2)
    assert Counts.sum(()) == Counts(0, 0, 0, 0, 0, 0)
