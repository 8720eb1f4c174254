from __future__ import annotations

import pytest

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.state.request import Counts, StoredRequest
from dualmap.scheduling.state.request import RequestState as State


def request(state: State, *, deferred: bool = False, band: int = 0) -> StoredRequest:
    return StoredRequest(
        "r", "replica", "a", state, 2, 100, 900, 256, slo_ms=5000, enqueued_ms=1000, deferred=deferred, band=band
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
        (100, 0, 0, 0, 1, 0, 0),
        (100, 0, 0, 0, 1, 0, 100),
        (100, 0, 100, 0, 1, 0, 0),
        (100, 100, 0, 1156, 0, 1, 0),
        (0, 0, 0, 1156, 0, 1, 0),
    ]
    assert Counts.sum(lives) == Counts(400, 100, 100, 2312, 3, 2, 100)
    assert Counts.sum(()) == Counts(0, 0, 0, 0, 0, 0)
