from __future__ import annotations

from itertools import product

import pytest

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.state.instance import InstanceState as State
from dualmap.scheduling.state.instance_lifecycle import InstanceEvent as Event
from dualmap.scheduling.state.instance_lifecycle import next_state

EXPECTED = {
    #                healthy, unhealthy, restarted, drain, drained, resume, park
    State.STARTING: ("ready", "starting", None, "standby", None, "starting", "standby"),
    State.READY: ("ready", "down", "starting", "draining", None, "ready", None),
    State.DRAINING: ("draining", "standby", None, "draining", "standby", "ready", None),
    State.DOWN: ("ready", "down", None, "standby", None, "starting", "standby"),
    State.STANDBY: ("standby", "standby", None, "standby", None, "starting", "standby"),
}
EVENTS = (Event.HEALTHY, Event.UNHEALTHY, Event.RESTARTED, Event.DRAIN, Event.DRAINED, Event.RESUME, Event.PARK)


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_event_in_every_state_is_decided(state: State, event: Event) -> None:
    expected = EXPECTED[state][EVENTS.index(event)]

    if expected is None:
        with pytest.raises(TransitionError, match=f"{state} cannot {event}"):
            next_state(state, event)
    else:
        assert next_state(state, event) == expected


@pytest.mark.parametrize("state", [State.DRAINING, State.STANDBY])
@pytest.mark.parametrize("event", [Event.HEALTHY, Event.UNHEALTHY])
def test_health_never_puts_back_into_service_what_somebody_took_out(state: State, event: Event) -> None:
    assert next_state(state, event) in {state, State.STANDBY}


def test_an_illegal_event_says_what_would_be_possible() -> None:
    with pytest.raises(TransitionError, match="possible: drain, healthy, restarted, resume, unhealthy"):
        next_state(State.READY, Event.PARK)
