"""A request whose instance pulls a part of its prompt from another one, and what becomes of it where that fails."""

from __future__ import annotations

import pytest

from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.request.machine import (
    SLOWEST_TOKEN_S,
    Arrived,
    Ended,
    Failed,
    FirstToken,
    Granted,
    Phase,
    Reserve,
    Reserved,
    Sent,
)
from dualmap.scheduling.request.outcome import ENGINE_DEATH, FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.state.tier_load import Source, TierLoad
from tests.scheduling.request.lives import CLOSED, Life, course_of, member

SOURCE = Source("c", "10.0.0.3", 5710, 4000, 0.3)
PULLS = TierLoad(3, 0.3, 0.3, source=SOURCE)
STUCK = InstanceFailure(FailureKind.TRANSFER)
LOST = InstanceFailure(FailureKind.STATUS, "KV load failure", status=500)


def pulling(**spec: object) -> Life:
    """A request that was sent with a source, and expects its first token within 0.4 s."""
    life = Life(**{"may_pull": True, **spec})
    life.on(Arrived())
    life.on(Reserved(course_of(life.placed(loads=PULLS)), member("a")))
    life.on(Sent())
    return life


def search_of(life: Life) -> Reserve:
    found = life.one(Reserve)
    assert isinstance(found, Reserve)
    return found


def test_its_instance_is_told_the_source() -> None:
    assert pulling().machine.source is SOURCE


def test_only_what_can_be_told_may_pull_and_only_at_the_first_try() -> None:
    for may_pull in (False, True):
        life = Life(may_pull=may_pull)
        life.on(Arrived())
        assert search_of(life).search.pulls is may_pull
    life = pulling()
    life.on(Failed(CLOSED))
    assert not search_of(life).search.pulls


@pytest.mark.parametrize("failure", [STUCK, LOST])
def test_a_pull_that_fails_is_sent_once_more_without_a_source_and_blames_nobody(failure: InstanceFailure) -> None:
    life = pulling(max_tries=1, budget=0.0)
    life.on(Failed(failure), after_s=1.0)

    assert life.machine.phase is Phase.PLACING
    assert not search_of(life).search.pulls
    assert not life.machine.excluded, "the same instance may compute it"
    assert life.released == [("x", 1)]
    assert life.machine.failures[0][1].kind is FailureKind.PULL
    assert life.rules.evidence.breakers.blocked(life.now_s) == frozenset()
    # when it is served at the second try
    life.reserve("a")
    assert life.machine.source is None
    life.on(Sent())
    life.on(FirstToken())
    life.on(Ended(Outcome.COMPLETED))
    assert life.machine.outcome is Outcome.COMPLETED
    assert life.released == [("x", 2)]


def test_an_engine_that_dies_during_a_pull_has_failed_itself() -> None:
    life = pulling()
    life.on(Failed(InstanceFailure(FailureKind.STATUS, ENGINE_DEATH, status=500)))

    assert life.machine.failures[0][1].kind is FailureKind.STATUS
    assert life.machine.excluded == {"a"}


def test_without_a_source_the_same_answer_is_a_failure_of_the_instance() -> None:
    life = Life(may_pull=True)
    life.dispatch()
    life.on(Sent())
    life.on(Failed(LOST))

    assert life.machine.failures[0][1].kind is FailureKind.STATUS
    assert life.machine.excluded == {"a"}


def test_the_first_token_is_awaited_for_a_multiple_of_what_is_expected() -> None:
    assert pulling().machine.pulled_within_s == pytest.approx(1.2 * (0.1 + 0.5) + 0.5), "0.3 of 0.4 s are the pull"
    long = pulling().machine
    assert long.placed is not None
    long.placed = Life().placed(loads=PULLS._replace(source=SOURCE._replace(tokens=40_000)))
    assert long.pulled_within_s == pytest.approx(1.2 * (0.1 + 5.0) + 0.5)
    long.placed = Life().placed(loads=PULLS._replace(source=SOURCE._replace(tokens=400)))
    assert long.pulled_within_s == pytest.approx(1.2 * 0.4 + 0.5), "pulling takes longer than computing"
    whole = pulling(streams=False, output_limit=8).machine
    assert whole.pulled_within_s == pytest.approx(1.2 * (0.1 + 0.5) + 0.5 + 8 * SLOWEST_TOKEN_S)
    assert pulling(streams=False).machine.pulled_within_s is None, "of an answer of unknown length"
    life = Life(may_pull=True)
    life.dispatch()
    assert life.machine.pulled_within_s is None


def test_a_held_request_that_is_moved_pulls_nothing() -> None:
    for instance_id, source in (("a", SOURCE), ("b", None)):
        life = Life(may_pull=True)
        life.on(Arrived())
        life.on(Reserved(course_of(life.placed(held=True, loads=PULLS)), None))
        life.on(Granted(Grant("x", instance_id, "r", 1, 48), member(instance_id)))
        assert life.machine.source is source
