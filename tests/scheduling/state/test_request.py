from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.state.instance import Counts
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState as State
from dualmap.scheduling.state.request import StoredRequest, growth_at_prefill


def request(state: State, *, deferred: bool = False, band: int = 0) -> StoredRequest:
    return StoredRequest(
        "r",
        "replica",
        "a",
        state,
        2,
        uncached_tokens=100,
        prompt_tokens=900,
        expected_output_tokens=256,
        slo_ms=5000,
        enqueued_ms=1000,
        deferred=deferred,
        band=band,
    )


@pytest.mark.parametrize("state", [State.DISPATCHED, State.PREFILLED])
def test_only_a_held_request_can_be_moved(state: State) -> None:
    moved = request(State.HELD).moved("b", 300)
    assert (moved.instance_id, moved.uncached_tokens, moved.alternative_id) == ("b", 300, "a")

    with pytest.raises(TransitionError, match=f"{state} cannot be moved"):
        request(state).moved("b", 300)


def test_a_request_takes_kv_memory_for_its_answer_too() -> None:
    assert request(State.HELD).context_tokens == 1156


def test_its_instance_counts_it_by_its_state() -> None:
    lives = (
        request(State.HELD),
        request(State.HELD, band=2),
        request(State.HELD, deferred=True, band=2),
        request(State.DISPATCHED),
        request(State.PREFILLED),
    )

    assert [each.counts for each in lives] == [
        Counts(pending_tokens=100, queued_requests=1),
        Counts(pending_tokens=100, queued_requests=1, yielding_tokens=100),
        Counts(pending_tokens=100, deferred_tokens=100, queued_requests=1),
        Counts(pending_tokens=100, dispatched_tokens=100, context_tokens=1156, running_requests=1),
        Counts(context_tokens=1156, running_requests=1),
    ]
    assert Counts.sum([each.counts for each in lives]) == Counts(
        pending_tokens=400,
        dispatched_tokens=100,
        deferred_tokens=100,
        context_tokens=2312,
        queued_requests=3,
        running_requests=2,
        yielding_tokens=100,
    )
    assert Counts.sum(()) == Counts()


@pytest.mark.parametrize("leg", [*Leg])
def test_the_first_token_changes_the_counts_by_what_follows_from_the_placement_alone(leg: Leg) -> None:
    dispatched = replace(request(State.DISPATCHED, band=2), leg=leg)
    prefilled = replace(dispatched, state=State.PREFILLED)

    assert Counts.sum([dispatched.counts, growth_at_prefill(dispatched)]) == prefilled.counts
