"""The life of a request, driven by hand: every pair of the table, and what follows from each event."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.placing.placement import Place, SearchFailed
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.request.machine import (
    _HANDLERS,
    LEGAL_IN,
    MAX_CONTINUATIONS,
    ON_AN_INSTANCE,
    TRANSITIONS,
    Arrived,
    AwaitGrant,
    AwaitInstance,
    AwaitTrial,
    AwaitTurn,
    CountRetry,
    DeadlinePassed,
    DecoderReserved,
    Effect,
    Ended,
    Event,
    Failed,
    FirstToken,
    Granted,
    Input,
    InstanceReady,
    Moved,
    NoDecoder,
    NotPlaced,
    Phase,
    Post,
    PrefillEnded,
    PrefillPresumed,
    Refusal,
    Refuse,
    Registered,
    ReleaseFirst,
    Rename,
    Renamed,
    ReservationLost,
    Reserve,
    Reserved,
    ReserveDecoder,
    Send,
    Sent,
    StartTimer,
    TrialOver,
    TurnedAway,
    TurnGoes,
)
from dualmap.scheduling.request.metering import KEPT
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.request.quarantine import SURVIVED_S
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.request.stored_request import stored_requests
from dualmap.scheduling.request.waiting_room import WaitingRoom
from dualmap.scheduling.runs.turn import RunName, Turn, TurnEnd
from dualmap.scheduling.state.adapter_wait import AdapterWait
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg, decode_leg_id
from dualmap.scheduling.state.request import RequestState
from dualmap.scheduling.tenants.budgets import Draw, Drawn, Draws, Limit, Measure, Period, budgets_of
from tests.scheduling.request.lives import CHAIN, CLOSED, Life, course_of, in_phase, member

REFUSED = InstanceFailure(FailureKind.CONNECT)
SLOW = InstanceFailure(FailureKind.TIMEOUT)
GIVEN_BACK = InstanceFailure(FailureKind.RECOMPUTED)
UNKNOWN_PATH = InstanceFailure(FailureKind.STATUS, status=404)
STUCK = InstanceFailure(FailureKind.TRANSFER)


# the table -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("phase", "given"), list(product(Phase, Input)))
def test_every_pair_of_the_table_is_a_move_or_an_error_that_changes_nothing(phase: Phase, given: Input) -> None:
    machine = Life().machine
    machine.phase = phase

    if (phase, given) in TRANSITIONS:
        machine._move(given)
        assert machine.phase is TRANSITIONS[phase, given]
    else:
        with pytest.raises(TransitionError, match=f"a request that is {phase} cannot be {given}"):
            machine._move(given)
        assert machine.phase is phase


def test_every_phase_can_be_reached_and_left_and_ends() -> None:
    reached, left = {Phase.NEW}, set()
    for (before, _), after in TRANSITIONS.items():
        if before is not after:
            reached.add(after)
            left.add(before)

    assert reached == set(Phase)
    assert left == set(Phase) - {Phase.DONE}
    assert all(TRANSITIONS[phase, Input.ENDED] is Phase.DONE for phase in Phase)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.DONE])
def test_a_request_that_is_cancelled_in_any_phase_is_closed_and_releases_what_may_be_reserved(phase: Phase) -> None:
    life = in_phase(phase)

    life.on(Ended(Outcome.CLIENT_GONE))

    assert life.machine.phase is Phase.DONE
    assert life.names[-1] == "Close"
    reserved = phase not in (Phase.NEW, Phase.PARKED, Phase.ADMITTING, Phase.AWAITING)
    assert (("x", 1) in life.released) is reserved
    if phase is Phase.PARKED:
        (post,) = [effect for effect in life.effects if isinstance(effect, Post)]
        assert post == Post(Release("x", replica_id="r", turn=TurnEnd("x", "r", was_sent=False)), last=True)
        return
    lasts = [effect.last for effect in life.effects if isinstance(effect, Post)]
    assert lasts == ([] if not reserved else [*[False] * (len(lasts) - 1), True]), "the last release is the last"
    decoded = phase in (Phase.PAIRING, Phase.PAIRED, Phase.STAGED, Phase.DECODING)
    assert any(name != "x" for name, _ in life.released) is decoded
    assert ("LeaveInstance" in life.names) is (phase in ON_AN_INSTANCE or phase is Phase.BROKEN_OFF)


@pytest.mark.parametrize(
    "event",
    [Arrived(), Sent(), FirstToken(), PrefillEnded(), Failed(CLOSED), Ended(Outcome.CUT_OFF), ReservationLost()],
)
def test_what_comes_after_the_end_changes_nothing(event: Event) -> None:
    life = in_phase(Phase.DONE)

    assert life.on(event) == ()
    assert life.machine.outcome is Outcome.COMPLETED


# one instance ----------------------------------------------------------------------------------------------------
def test_a_streamed_request_releases_its_tokens_at_its_first_token_and_the_rest_at_its_end() -> None:
    life = Life()
    life.on(Arrived())
    assert life.names == ["Reserve"]
    life.reserve()
    assert life.effects == (Send(),)
    assert life.on(Sent()) == ()

    life.on(FirstToken(), after_s=1.5)
    post = life.one(Post)
    assert isinstance(post, Post)
    assert (post.release.instance_id, post.release.seen, post.teaches) == ("a", True, True)
    assert life.machine.first_token_s == 1.5
    assert life.on(FirstToken()) == (), "once"

    life.on(Ended(Outcome.COMPLETED, Usage(48, 0, 9)), after_s=2.0)
    assert life.names == ["LeaveInstance", "Post", "Close"]
    assert life.released == [("x", 1)]
    assert (life.machine.outcome, life.machine.ended_s) == (Outcome.COMPLETED, 3.5)


def test_a_whole_answer_is_released_by_its_expected_time_which_no_one_takes_for_a_sign_of_life() -> None:
    life = Life(streams=False)
    life.dispatch()
    life.on(Sent())
    assert life.effects == (StartTimer(1.5),)
    assert life.on(Sent()) == (), "over a new connection it has one timer"

    life.on(PrefillPresumed())
    presumed = life.one(Post)
    assert isinstance(presumed, Post)
    assert (presumed.release.instance_id, presumed.release.seen, presumed.release.note) == ("a", False, "")
    assert life.on(FirstToken()) == (), "its tokens are released already"
    assert life.machine.phase is Phase.ANSWERING


def test_the_timer_of_a_whole_answer_that_came_before_it_changes_nothing() -> None:
    life = Life(streams=False)
    life.dispatch()
    life.on(Sent())
    life.on(FirstToken())

    assert life.on(PrefillPresumed()) == ()


def test_a_held_request_waits_for_its_grant_as_long_as_it_may_and_goes_where_that_says() -> None:
    life = Life(streams=False)
    life.hold()
    waits = life.one(AwaitGrant)
    assert isinstance(waits, AwaitGrant)
    assert (waits.attempt, waits.within_s) == (1, 60.0)

    life.on(Granted(Grant("x", "b", "r", 1, 30, deferred=True), member("b")), after_s=2.0)

    assert life.effects == (Send(),)
    assert (life.machine.instance_id, life.machine.held_s, life.machine.uncached_tokens) == ("b", 2.0, 30)
    life.on(Sent())
    assert life.effects == (StartTimer(7.0),), "a full dispatch window is before it"


def test_time_that_was_held_before_the_reservation_was_lost_counts() -> None:
    life = Life()
    life.hold()

    life.on(ReservationLost(), after_s=20.0)
    assert life.names == ["ReleaseFirst", "Reserve"]
    assert life.released == [("x", 2)]
    life.on(Reserved(course_of(life.placed(held=True)), None))

    waits = life.one(AwaitGrant)
    assert isinstance(waits, AwaitGrant)
    assert (waits.attempt, waits.within_s) == (2, 40.0)


def test_an_id_that_is_another_live_requests_is_changed() -> None:
    life = Life()
    life.on(Arrived())
    life.on(NotPlaced(SearchFailed(duplicate=True)))
    assert life.effects == (Rename(),)

    life.on(Renamed("y"))

    reserve = life.one(Reserve)
    assert isinstance(reserve, Reserve)
    assert reserve.search.request.request_id == life.machine.request_id == "y"


@pytest.mark.parametrize(
    ("event", "why", "outcome"),
    [
        (NotPlaced(SearchFailed()), Refusal.NO_INSTANCE, Outcome.REFUSED),
        (NotPlaced(SearchFailed(frozenset("a"))), Refusal.QUEUE_FULL, Outcome.REFUSED),
    ],
)
def test_a_request_that_no_instance_takes_is_refused_and_has_nothing_to_release(
    event: Event, why: Refusal, outcome: Outcome
) -> None:
    life = Life()
    life.on(Arrived())

    life.on(event)

    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert (refuse.why, life.machine.outcome, life.released) == (why, outcome, [])


# on time or not --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.DONE])
def test_a_deadline_may_pass_in_any_phase_and_changes_nothing_but_the_judgement(phase: Phase) -> None:
    life = in_phase(phase)
    before = dict(vars(life.machine))

    assert life.on(DeadlinePassed(), after_s=9.0) == ()

    seen = phase is Phase.ANSWERING or phase is Phase.BROKEN_OFF
    assert life.machine.on_time is (seen or phase is Phase.PRESUMED)
    assert vars(life.machine) == before | {"on_time": life.machine.on_time}


@pytest.mark.parametrize(
    ("events", "on_time"),
    [
        ([(FirstToken(), 4.9), (DeadlinePassed(), 0.2)], True),
        ([(FirstToken(), 5.1)], False),
        ([(DeadlinePassed(), 5.1), (FirstToken(), 0.0)], False),
        ([(DeadlinePassed(), 5.1), (Ended(Outcome.CLIENT_GONE), 0.0)], False),
        ([(Ended(Outcome.CLIENT_GONE), 4.9)], None),
        ([(Ended(Outcome.CLIENT_GONE), 5.1)], False),
        ([(Ended(Outcome.CLIENT_ERROR), 1.0)], None),
        ([(Ended(Outcome.UPSTREAM_FAILED), 1.0)], False),
        ([(Ended(Outcome.CUT_OFF), 1.0)], False),
        ([(Ended(Outcome.COMPLETED), 1.0)], True),
        ([(FirstToken(), 1.0), (Ended(Outcome.UPSTREAM_FAILED), 9.0)], True),
    ],
)
def test_a_stream_is_on_time_by_its_first_token_its_deadline_or_its_end(
    events: list[tuple[Event, float]], on_time: bool | None
) -> None:
    life = in_phase(Phase.PREFILLING)

    for event, after_s in events:
        life.on(event, after_s=after_s)

    assert life.machine.on_time is on_time


@pytest.mark.parametrize(
    ("why", "on_time"),
    [
        (SearchFailed(), False),
        (SearchFailed(frozenset("a")), False),
        (SearchFailed(limited=Drawn((0,), 0)), None),
    ],
)
def test_what_is_refused_for_overload_is_not_on_time_and_a_tenants_own_limit_is_no_lateness(
    why: SearchFailed, on_time: bool | None
) -> None:
    life = Life()
    life.on(Arrived())

    life.on(NotPlaced(why))

    assert life.machine.is_done
    assert life.machine.on_time is on_time


def test_a_held_request_that_is_turned_away_is_not_on_time() -> None:
    life = in_phase(Phase.HELD)

    life.on(TurnedAway(Refusal.LATE_FOR_TOO_LONG), after_s=1.0)

    assert life.machine.on_time is False


def test_the_first_byte_of_a_whole_answer_is_no_first_token() -> None:
    life = Life(streams=False)
    life.dispatch()
    life.on(Sent())
    life.on(PrefillPresumed(), after_s=2.0)
    life.on(FirstToken(), after_s=30.0)
    assert life.machine.on_time is None

    life.on(Ended(Outcome.COMPLETED))
    assert life.machine.on_time is True


def test_a_request_that_is_passed_on_has_no_deadline() -> None:
    life = Life(chain=None)
    life.on(Arrived())
    life.on(DeadlinePassed(), after_s=60.0)
    life.on(Ended(Outcome.UPSTREAM_FAILED))

    assert life.machine.on_time is None


# without an instance ---------------------------------------------------------------------------------------------
def sent_away(life: Life) -> Refusal:
    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    return refuse.why


@pytest.mark.parametrize("chain", [CHAIN, None])
def test_without_any_instance_a_request_waits_for_the_first_one_and_is_searched_for_again(chain: Chain | None) -> None:
    room = WaitingRoom(3, 60.0)
    life = Life(room=room, chain=chain)
    life.on(Arrived())
    if chain is not None:
        life.on(NotPlaced(SearchFailed()))
    assert life.effects == (AwaitInstance(60.0),)
    assert (life.machine.phase, room.waiting) == (Phase.AWAITING, 1)

    life.fleet.members = (member("a"),)
    life.on(InstanceReady(), after_s=20.0)

    assert room.waiting == 0
    assert life.names == (["Send"] if chain is None else ["Reserve"])
    if chain is not None:
        life.reserve()
        assert life.machine.expected_ttft_s is None, "its placement expected nothing of the wait"
    assert life.machine.phase is Phase.DISPATCHED


def test_all_waits_for_the_first_instance_together_are_no_longer_than_one_may_be() -> None:
    life = Life(room=WaitingRoom(3, 60.0))
    life.on(Arrived())
    life.on(NotPlaced(SearchFailed()))
    life.on(InstanceReady(), after_s=20.0)
    life.on(NotPlaced(SearchFailed()), after_s=5.0)  # it is gone already

    assert life.effects == (AwaitInstance(35.0),)


def test_a_request_that_waited_in_vain_is_refused_and_leaves_the_room() -> None:
    room = WaitingRoom(3, 60.0)
    life = Life(room=room)
    life.on(Arrived())
    life.on(NotPlaced(SearchFailed()))
    life.on(TurnedAway(Refusal.NOT_STARTED), after_s=60.0)

    assert (sent_away(life), room.waiting, life.released) == (Refusal.NOT_STARTED, 0, [])
    assert life.machine.outcome is Outcome.REFUSED


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_leaves_makes_room_for_another_one_to_wait(leaves: bool) -> None:
    room = WaitingRoom(1, 60.0)
    first, second = Life(room=room), Life(room=room)
    first.on(Arrived())
    first.on(NotPlaced(SearchFailed()))
    if leaves:
        first.on(Ended(Outcome.CLIENT_GONE))
    second.on(Arrived())
    second.on(NotPlaced(SearchFailed()))

    assert second.machine.phase is (Phase.AWAITING if leaves else Phase.DONE)
    assert room.waiting == 1
    if not leaves:
        assert sent_away(second) is Refusal.TOO_MANY_WAIT


@pytest.mark.parametrize(
    ("about", "members"),
    [
        ({"room": None}, ()),  # the pool is to have an instance at all times
        ({"room": WaitingRoom(3, 60.0)}, (member("a"),)),  # it has one that does not serve this model
        ({"room": WaitingRoom(3, 60.0), "pinned_to": "a"}, ()),
        ({"room": WaitingRoom(3, 60.0), "only": frozenset({"a"})}, ()),
    ],
)
def test_a_request_that_no_first_instance_would_help_does_not_wait_for_one(
    about: dict[str, Any], members: tuple[InstanceSpec, ...]
) -> None:
    life = Life(**about)
    life.fleet.members = members
    life.on(Arrived())
    life.on(NotPlaced(SearchFailed()))

    assert sent_away(life) is Refusal.NO_INSTANCE


@pytest.mark.parametrize("why", [Refusal.HELD_TOO_LONG, Refusal.IS_LATE, Refusal.LATE_FOR_TOO_LONG])
def test_a_held_request_that_is_turned_away_is_released(why: Refusal) -> None:
    life = Life()
    life.hold()

    life.on(TurnedAway(why), after_s=60.0)

    assert life.released == [("x", 1)]
    assert life.machine.outcome is (Outcome.TIMED_OUT if why is Refusal.HELD_TOO_LONG else Outcome.REFUSED)


def test_an_instance_that_is_gone_when_it_has_room_leaves_a_reservation_to_release() -> None:
    life = Life()
    life.on(Arrived())
    life.on(Reserved(course_of(life.placed("gone")), None))

    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert (refuse.why, life.released) == (Refusal.INSTANCE_REMOVED, [("x", 1)])


# retries ---------------------------------------------------------------------------------------------------------
def test_a_failed_try_is_released_before_the_next_search_which_excludes_its_instance() -> None:
    life = Life()
    life.dispatch()
    life.on(Sent())

    life.on(Failed(CLOSED), after_s=1.0)

    assert life.names == ["LeaveInstance", "CountRetry", "ReleaseFirst", "Reserve"]
    assert life.released == [("x", 1)]
    reserve = life.one(Reserve)
    assert isinstance(reserve, Reserve)
    assert (reserve.search.query.excluded, reserve.search.request.attempt) == (frozenset("a"), 2)
    assert reserve.search.was_admitted, "its budgets let the try before in"
    life.reserve("b")
    assert life.machine.tries == 2
    assert life.machine.expected_ttft_s is None, "no estimate includes the time lost before"


@pytest.mark.parametrize(
    ("how", "failure", "why", "outcome"),
    [
        ({"max_tries": 1}, CLOSED, Refusal.TRIES_SPENT, Outcome.UPSTREAM_FAILED),
        ({"max_tries": 1}, SLOW, Refusal.TRIES_SPENT, Outcome.TIMED_OUT),
        ({"max_tries": 1}, UNKNOWN_PATH, Refusal.TRIES_SPENT, Outcome.CLIENT_ERROR),
        ({"budget": 0.0}, CLOSED, Refusal.BUDGET_SPENT, Outcome.UPSTREAM_FAILED),
        ({"streams": False}, SLOW, Refusal.TOO_SLOW, Outcome.TIMED_OUT),
    ],
)
def test_a_failed_try_without_another_one_ends_the_request_and_releases_it(
    how: dict[str, object], failure: InstanceFailure, why: Refusal, outcome: Outcome
) -> None:
    life = Life(**how)
    life.dispatch()
    life.on(Sent())

    life.on(Failed(failure))

    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert (refuse.why, life.machine.outcome, life.released) == (why, outcome, [("x", 1)])


def test_a_refused_connection_costs_nothing_of_the_budget() -> None:
    life = Life(budget=0.0)
    life.dispatch()

    life.on(Failed(REFUSED))

    assert "Reserve" in life.names


def test_an_overdue_request_is_not_tried_again() -> None:
    life = Life()
    life.dispatch()
    life.on(Sent())

    life.on(Failed(SLOW, overdue=True))

    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert (refuse.why, life.machine.outcome) == (Refusal.OVERDUE, Outcome.TIMED_OUT)


def test_without_another_ready_instance_the_one_that_gave_it_back_is_better_than_none() -> None:
    life = Life()
    life.dispatch()
    life.on(FirstToken())
    life.on(Failed(GIVEN_BACK))

    life.on(NotPlaced(SearchFailed()))

    reserve = life.one(Reserve)
    assert isinstance(reserve, Reserve)
    assert reserve.search.query.excluded == frozenset()
    life.on(NotPlaced(SearchFailed()))
    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert refuse.why is Refusal.NOBODY_LEFT


# the rest of an answer -------------------------------------------------------------------------------------------
def answering(**how: object) -> Life:
    """A stream whose client has a part of the answer."""
    life = Life(expected_output_tokens=40, **how)
    life.dispatch()
    life.on(Sent())
    life.on(FirstToken())
    return life


def test_the_rest_of_an_answer_is_placed_as_a_longer_prompt_that_waits_from_now_on() -> None:
    life = answering()

    life.on(Failed(CLOSED, sent_tokens=30), after_s=9.0)

    assert life.names == ["LeaveInstance", "CountRetry", "ReleaseFirst", "Reserve"]
    assert life.one(CountRetry) == CountRetry(FailureKind.CLOSED, continues=True)
    assert life.released == [("x", 1)]
    reserve = life.one(Reserve)
    assert isinstance(reserve, Reserve)
    query, record = reserve.search.query, reserve.search.request
    assert (query.chain.prompt_tokens, query.chain.hashes) == (CHAIN.prompt_tokens + 30, CHAIN.hashes)
    assert (query.expected_output_tokens, query.excluded) == (10, frozenset("a"))
    assert (record.prompt_tokens, record.enqueued_ms, record.attempt) == (CHAIN.prompt_tokens + 30, 0, 2)
    assert life.machine.continuations == (("a", 30, 9.0),)
    life.reserve("b")
    life.on(Sent())
    life.on(FirstToken(), after_s=0.5)
    assert (life.machine.phase, life.machine.first_token_s) == (Phase.ANSWERING, 0.0), "its TTFT is that of its begin"
    assert life.machine.queued_for_s(life.now_s) == 0.5
    life.on(Ended(Outcome.COMPLETED))
    assert life.released == [("x", 2)]


def test_tries_count_from_the_last_token_on_and_instances_that_failed_before_may_have_recovered() -> None:
    life = answering(max_tries=2)
    for _ in range(3):
        life.on(Failed(CLOSED, sent_tokens=30), after_s=10.0)
        life.reserve("b")
        life.on(Failed(CLOSED))
        reserve = life.one(Reserve)
        assert isinstance(reserve, Reserve)
        assert len(reserve.search.query.excluded) <= 2
        life.reserve("c")
        life.on(FirstToken())


@pytest.mark.parametrize(
    ("how", "times", "why"),
    [({}, MAX_CONTINUATIONS, Refusal.CONTINUED_TOO_OFTEN), ({"budget": 2.0}, 2, Refusal.BUDGET_SPENT)],
)
def test_an_answer_continues_as_often_as_the_limits_allow(how: dict[str, object], times: int, why: Refusal) -> None:
    life = answering(**how)
    for _ in range(times):
        life.on(Failed(CLOSED, sent_tokens=30), after_s=10.0)
        life.reserve("b")
        life.on(FirstToken())

    life.on(Failed(CLOSED, sent_tokens=30), after_s=10.0)

    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert (refuse.why, life.machine.outcome, life.released) == (why, Outcome.UPSTREAM_FAILED, [("x", times + 1)])


@pytest.mark.parametrize(("answered_s", "suspected"), [(0.5, True), (SURVIVED_S, False)])
def test_a_prompt_that_an_engine_had_answered_for_a_while_is_not_put_its_death_down_to(
    answered_s: float, suspected: bool
) -> None:
    life = answering()

    life.on(Failed(CLOSED, sent_tokens=30), after_s=answered_s)

    assert (7 in life.rules.evidence.quarantine.suspects) is suspected
    assert (life.machine.trial is not None) is suspected


def test_before_the_first_token_there_is_nothing_to_continue() -> None:
    life = Life()
    life.dispatch()
    life.on(Sent())

    life.on(Failed(CLOSED, sent_tokens=0))

    assert life.machine.continuations == ()
    assert life.one(CountRetry) == CountRetry(FailureKind.CLOSED)


def test_a_failure_behind_the_first_byte_judges_the_instance_and_waits_for_the_end() -> None:
    life = Life()
    life.dispatch()
    life.on(FirstToken())

    assert life.on(Failed(CLOSED, begun=True)) == ()

    life.on(Ended(Outcome.UPSTREAM_FAILED))
    assert life.released == [("x", 1)]
    own, _ = life.rules.evidence.breakers._window.of("a", life.now_s)
    assert (own.faults, own.total) == (1, 1), "its end judges it no second time"


@pytest.mark.parametrize(("outcome", "faults"), [(Outcome.COMPLETED, 1), (Outcome.CLIENT_ERROR, 0)])
def test_a_disputed_answer_is_its_instances_fault_only_if_another_one_answers(outcome: Outcome, faults: int) -> None:
    life = Life()
    life.dispatch()
    life.on(Failed(UNKNOWN_PATH))
    life.reserve("b")
    assert life.rules.evidence.breakers._window.of("a", life.now_s)[0].faults == 0

    life.on(Ended(outcome))

    assert life.rules.evidence.breakers._window.of("a", life.now_s)[0].faults == faults


def test_a_suspected_prompt_waits_for_the_trial_of_another_copy_of_it() -> None:
    life = in_phase(Phase.ADMITTING)
    waits = life.one(AwaitTrial)
    assert isinstance(waits, AwaitTrial)

    waits.trial.passes()
    life.on(TrialOver())

    assert life.names == ["Reserve"]


def test_the_trial_of_a_suspected_prompt_passes_with_its_first_token() -> None:
    life = Life()
    quarantine = life.rules.evidence.quarantine
    quarantine.answered("c", life.now_s)
    quarantine.died(7, "c", "other", life.now_s, life.now_s)
    life.dispatch()
    trial = life.machine.trial
    assert trial is not None

    life.on(FirstToken())
    assert trial.passed
    life.on(Ended(Outcome.COMPLETED))

    assert quarantine.of(7, life.now_s) is None, "cleared"


def test_a_prompt_that_killed_two_engines_is_refused_and_its_reservation_released() -> None:
    life = Life()
    for instance_id in "ab":
        life.rules.evidence.quarantine.answered(instance_id, life.now_s)
    life.dispatch()
    life.on(Failed(CLOSED))
    life.reserve("b")

    life.on(Failed(CLOSED), after_s=10.0)

    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert (refuse.why, life.released) == (Refusal.QUARANTINED, [("x", 2)])


# two legs --------------------------------------------------------------------------------------------------------
def test_a_split_request_is_prefilled_staged_and_decoded() -> None:
    life = Life(split=True)
    life.dispatch(leg=Leg.PREFILL)
    assert life.machine.to_send is Leg.PREFILL
    life.on(Sent())

    life.on(PrefillEnded(), after_s=1.0)
    assert life.names == ["Post", "ReserveDecoder"]
    life.decode()
    assert (life.effects, life.machine.to_send, life.machine.answering_id) == ((Send(),), Leg.DECODE, "d")

    life.on(FirstToken(), after_s=0.25)
    freed = life.one(Post)
    assert isinstance(freed, Post)
    assert life.released == [("x", 1)], "the decoder has the KV"
    assert '"transfer_ms":250' in freed.release.note
    life.on(Ended(Outcome.COMPLETED))
    assert [name for name, _ in life.released] == ["x~decode"], "each leg is released once"


def test_the_transfer_of_a_rest_is_that_of_the_longer_prompt() -> None:
    life = Life(split=True)
    life.stage()
    life.decode()
    life.on(Sent())
    life.on(FirstToken())
    life.on(Failed(CLOSED, sent_tokens=30), after_s=9.0)
    life.reserve("b", leg=Leg.PREFILL)
    life.on(Sent())
    life.on(PrefillEnded(), after_s=1.0)
    life.decode("e")
    life.on(Sent())

    life.on(FirstToken(), after_s=0.25)

    freed = life.one(Post)
    assert isinstance(freed, Post)
    assert '"transferred_tokens":48}' in freed.release.note, "those that its decoder does not have, of all 78"


def test_a_decode_leg_goes_to_another_decoder_for_the_same_kv_once() -> None:
    life = Life(split=True)
    life.stage()
    life.decode()
    life.on(Sent())

    life.on(Failed(REFUSED, keeps_kv=True))
    assert life.names == ["CountRetry", "ReleaseFirst", "ReserveDecoder"]
    search = life.one(ReserveDecoder)
    assert isinstance(search, ReserveDecoder)
    assert "d" in search.search.query.excluded
    life.decode("e")
    life.on(Sent())
    life.on(Failed(REFUSED, keeps_kv=True))

    assert life.names == ["LeaveInstance", "CountRetry", "ReleaseFirst", "Reserve"], "from the start, elsewhere"
    assert life.released == [("x~decode", 2), ("x", 1)]


@pytest.mark.parametrize("failure", [GIVEN_BACK, STUCK])
def test_kv_that_is_lost_or_stuck_is_prefilled_again(failure: InstanceFailure) -> None:
    life = Life(split=True)
    life.stage()
    life.decode()

    life.on(Failed(failure, keeps_kv=True))

    assert "Reserve" in life.names


def test_a_staged_kv_that_is_old_is_prefilled_again() -> None:
    life = Life(split=True)
    life.stage()
    life.decode()

    life.on(Failed(CLOSED, keeps_kv=True), after_s=life.rules.staged_timeout_s + 1)

    assert "Reserve" in life.names


def test_without_a_decoder_those_that_failed_are_better_than_none_and_then_it_is_placed_again() -> None:
    life = Life(split=True)
    life.stage()
    life.decode()
    life.on(Failed(CLOSED, keeps_kv=True))

    life.on(NoDecoder())
    search = life.one(ReserveDecoder)
    assert isinstance(search, ReserveDecoder)
    assert search.search.query.excluded == frozenset()
    life.on(NoDecoder())

    assert life.names == ["LeaveInstance", "CountRetry", "ReleaseFirst", "Reserve"]
    retry = life.one(CountRetry)
    assert isinstance(retry, CountRetry)
    assert retry.kind is FailureKind.NO_DECODER


def test_a_decode_leg_that_goes_first_is_placed_before_anything_is_sent() -> None:
    life = Life(split=True, decode_first=True)
    life.dispatch(leg=Leg.PREFILL)
    assert life.names == ["ReserveDecoder"]

    life.decode()
    assert (life.effects, life.machine.phase) == ((Send(),), Phase.PAIRED)
    life.on(PrefillEnded())
    assert (life.machine.phase, life.names) == (Phase.DECODING, ["Post"])
    life.on(FirstToken())
    assert life.released == [("x", 1)]


def test_the_first_token_may_come_before_the_prefill_leg_has_confirmed_its_last_layer() -> None:
    life = Life(split=True, decode_first=True)
    life.dispatch(leg=Leg.PREFILL)
    life.decode()
    life.on(FirstToken())

    assert life.on(PrefillEnded()) == ()
    assert life.machine.phase is Phase.ANSWERING


@pytest.mark.parametrize(("leg", "excluded"), [(Leg.PREFILL, {"a"}), (None, {"d"})])
def test_of_two_legs_at_once_the_one_that_failed_is_excluded_and_both_are_released(
    leg: Leg | None, excluded: set[str]
) -> None:
    life = Life(split=True, decode_first=True)
    life.dispatch(leg=Leg.PREFILL)
    life.decode()

    life.on(Failed(CLOSED, leg=leg))

    assert life.released == [("x~decode", 1), ("x", 1)]
    assert life.machine.excluded == excluded


# passed on -------------------------------------------------------------------------------------------------------
def test_a_request_that_is_passed_on_reserves_and_releases_nothing() -> None:
    life = Life(chain=None)
    life.on(Arrived())
    assert life.effects == (Send(),)
    first = life.machine.instance_id
    life.on(Sent())

    life.on(Failed(CLOSED))
    assert life.names == ["LeaveInstance", "CountRetry", "Send"]
    assert life.machine.instance_id != first
    life.on(FirstToken())
    life.on(Ended(Outcome.COMPLETED))

    assert life.names == ["LeaveInstance", "Close"]
    assert not life.rules.balancer._in_flight


def test_a_request_that_is_passed_on_and_pinned_has_no_second_instance() -> None:
    life = Life(chain=None, pinned_to="b")
    life.on(Arrived())
    assert life.machine.instance_id == "b"

    life.on(Failed(CLOSED))

    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert refuse.why is Refusal.NOBODY_LEFT


# what is not legal -----------------------------------------------------------------------------------------------
EVENTS: tuple[Event, ...] = (
    Arrived(),
    TurnGoes(),
    TrialOver(),
    Reserved(course_of(Life().placed()), member("a")),
    Registered(Drawn()),
    NotPlaced(SearchFailed(full=True)),
    Renamed("y"),
    InstanceReady(),
    Granted(Grant("x", "b", "r", 1, 30), member("b")),
    ReservationLost(),
    TurnedAway(Refusal.HELD_TOO_LONG),
    Sent(),
    PrefillPresumed(),
    DeadlinePassed(),
    FirstToken(),
    PrefillEnded(),
    DecoderReserved(Life().placed("d"), member("d")),
    NoDecoder(),
    Failed(CLOSED),
    Failed(CLOSED, begun=True),
    Moved(CLOSED, member("b")),
    Ended(Outcome.CLIENT_GONE),
)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.DONE])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_taken_in_its_phases_and_raises_and_changes_nothing_in_others(phase: Phase, event: Event) -> None:
    life = in_phase(phase)
    before = dict(vars(life.machine))
    of_another_form = (isinstance(event, PrefillEnded) and life.machine.leg is Leg.WHOLE) or isinstance(
        event, Registered
    )

    if phase in LEGAL_IN[type(event)] and not of_another_form:
        life.on(event)
    else:
        with pytest.raises(TransitionError):
            life.on(event)

        assert vars(life.machine) == before


def test_every_event_has_its_phases_and_a_handler() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event)) == LEGAL_IN.keys() == _HANDLERS.keys()


def test_effects_and_events_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Sent().x = 1  # type: ignore[attr-defined]
    assert replace(Failed(CLOSED), begun=True) == Failed(CLOSED, True)


def test_an_arrival_that_is_not_legal_begins_no_trial() -> None:
    life = Life()
    life.dispatch()
    quarantine = life.rules.evidence.quarantine
    quarantine.answered("c", life.now_s)
    quarantine.died(7, "c", "other", life.now_s, life.now_s)

    with pytest.raises(TransitionError):
        life.on(Arrived())

    assert life.machine.trial is None
    assert quarantine.suspects[7].trial is None


def test_a_decode_leg_without_a_retry_left_does_not_wait_for_its_own_trial() -> None:
    life = Life(split=True, budget=0.0)
    life.stage()
    life.decode()
    life.on(Sent())
    life.rules.evidence.quarantine.answered("d", life.now_s)

    life.on(Failed(CLOSED, keeps_kv=True))

    refuse = life.one(Refuse)
    assert isinstance(refuse, Refuse)
    assert refuse.why is Refusal.BUDGET_SPENT
    assert life.machine.trial is None
    suspect_now = life.rules.evidence.quarantine.of(7, life.now_s)
    assert suspect_now is not None
    assert suspect_now.trial is None, "its place is left to the next copy"


# a gateway that carries the bytes --------------------------------------------------------------------------------
MOVED = InstanceFailure(FailureKind.MOVED)


def test_a_request_that_a_gateway_moved_is_booked_where_it_is_whatever_the_limits_say() -> None:
    life = Life(max_tries=1, budget=0.0)
    life.dispatch()
    life.on(Sent())

    life.on(Moved(MOVED, member("b")), after_s=1.0)

    assert life.names == ["LeaveInstance", "CountRetry", "ReleaseFirst", "Enter"]
    assert life.released == [("x", 1)]
    machine = life.machine
    assert (machine.phase, machine.instance_id, machine.answering_id) == (Phase.PREFILLING, "b", "b")
    assert (machine.attempt, machine.tries, machine.uncached_tokens) == (2, 2, 48)
    (record,) = stored_requests(machine, 1000, life.now_s)
    assert (record.instance_id, record.attempt, record.state) == ("b", 2, RequestState.DISPATCHED)

    life.on(Ended(Outcome.ENDED))
    assert life.released == [("x", 2)]
    assert "a" in life.rules.evidence.breakers._kept, "the other one answered, so the first one is to blame"


def test_a_moved_request_that_no_one_answered_blames_nobody_for_the_move() -> None:
    life = Life()
    life.dispatch()
    life.on(Sent())
    life.on(Moved(MOVED, member("b")))

    life.on(Ended(Outcome.CLIENT_GONE))

    assert "a" not in life.rules.evidence.breakers._kept


def test_a_moved_request_that_is_not_scheduled_reserves_nothing() -> None:
    life = Life(chain=None)
    life.on(Arrived())
    life.on(Sent())
    first = life.machine.instance_id
    other = next(name for name in "abc" if name != first)

    life.on(Moved(MOVED, member(other)))

    assert life.names == ["LeaveInstance", "CountRetry"]
    assert dict(life.rules.balancer._in_flight) == {other: 1}


def test_a_stream_whose_first_token_nobody_sees_is_released_by_its_expected_time() -> None:
    life = Life(streams=True, hides_first_token=True)
    life.dispatch()

    life.on(Sent())
    assert life.effects == (StartTimer(1.5),)
    life.on(PrefillPresumed())
    assert not life.one(Post).release.seen

    life.on(Ended(Outcome.ENDED))
    (last,) = [effect for effect in life.effects if isinstance(effect, Post)]
    assert not last.release.seen, "an end of which no one knows whether it was whole is no sign of life"


def test_a_split_stream_whose_first_token_nobody_sees_frees_its_prefill_instance_by_the_expected_time() -> None:
    life = Life(split=True, decode_first=True, hides_first_token=True)
    life.dispatch(leg=Leg.PREFILL)
    life.decode()
    assert life.on(Sent()) == (StartTimer(1.5),)

    life.on(PrefillPresumed())

    assert life.machine.phase is Phase.PAIRED
    assert life.one(Post).release == Release("x", "a")
    life.on(Ended(Outcome.ENDED))
    assert {name for name, _ in life.released} == {"x", decode_leg_id("x")}


def test_only_the_allowed_instances_are_searched_and_picked_and_named_as_a_second_choice() -> None:
    life = Life(only=frozenset("c"))
    life.on(Arrived())
    search = life.one(Reserve).search
    step = next(search.run())
    assert isinstance(step, Place)
    candidates = step.placement.weighing.instances
    assert candidates == ("c",)
    assert search.request.pinned, "no worker moves it out of them"

    life.reserve("c")
    assert life.machine.second_choice() is None

    passed_on = Life(chain=None, only=frozenset("b"))
    passed_on.on(Arrived())
    assert passed_on.machine.instance_id == "b"
    assert passed_on.machine.second_choice() is None


def test_the_second_choice_is_the_next_best_of_the_decision_and_another_one_of_a_request_that_is_not_scheduled() -> (
    None
):
    life = Life()
    life.dispatch("a")
    assert life.machine.second_choice() == member("b")

    passed_on = Life(chain=None)
    passed_on.on(Arrived())
    second = passed_on.machine.second_choice()
    assert second is not None
    assert second.instance_id != passed_on.machine.instance_id

    pinned = Life(pinned_to="a")
    pinned.dispatch("a")
    assert pinned.machine.second_choice() is None


def test_every_effect_but_sending_has_one_place_in_the_driver_of_a_replica() -> None:
    from dualmap.router.requests import live_request

    carried_out = live_request._CARRIED_OUT.keys() | {Send}  # by the caller of the driver, who reads where to
    assert carried_out | live_request._ANSWERED.keys() == set(get_args(Effect))
    assert not live_request._CARRIED_OUT.keys() & live_request._ANSWERED.keys()


# runs ------------------------------------------------------------------------------------------------------------
NAME = RunName("run", "agent")


def test_a_turn_waits_until_its_run_may_use_memory_and_its_last_release_ends_it() -> None:
    life = Life(admit_runs=True, run=NAME)
    life.on(Arrived())
    first = life.one(Reserve)
    assert isinstance(first, Reserve) and first.search.turn == Turn("x", "r", NAME, CHAIN, 4.0)
    life.on(NotPlaced(SearchFailed(parked=True)))
    assert life.effects == (AwaitTurn(Turn("x", "r", NAME, CHAIN, 4.0), 60.0),)

    life.on(TurnGoes(), after_s=50.0)
    again = life.one(Reserve)
    assert isinstance(again, Reserve) and again.search.turn is None, "it is known to go"
    life.reserve()
    life.on(Sent())
    life.on(FirstToken(), after_s=2.0)
    life.on(Ended(Outcome.COMPLETED, Usage(output_tokens=9)), after_s=3.0)

    assert life.machine.parked_s == 50.0
    assert life.machine.on_time is False, "its client has waited"
    assert life.machine.expected_ttft_s == 51.5
    (last,) = [effect.release for effect in life.effects if isinstance(effect, Post) and effect.last]
    assert (last.request_id, last.attempt, last.turn) == ("x", 1, TurnEnd("x", "r", 9, 2000, 3000))


@pytest.mark.parametrize(("slo_s", "waits_s"), [(5.0, 4.0), (1.0, 0.8), (3600.0, 4.0)])
def test_a_slo_of_a_client_lets_its_turns_be_late_sooner_but_not_later(slo_s: float, waits_s: float) -> None:
    life = Life(admit_runs=True, slo_s=slo_s)
    life.on(Arrived())

    reserve = life.one(Reserve)
    assert isinstance(reserve, Reserve) and reserve.search.turn is not None
    assert reserve.search.turn.waits_s == waits_s


def test_the_hold_of_a_turn_begins_when_it_goes() -> None:
    life = Life(admit_runs=True)
    life.park()
    life.on(TurnGoes(), after_s=50.0)

    life.on(Reserved(course_of(life.placed(held=True)), None))

    hold = life.one(AwaitGrant)
    assert isinstance(hold, AwaitGrant)
    assert hold.within_s == 60.0


def test_the_end_of_a_turn_says_whether_an_instance_had_it() -> None:
    life = Life(admit_runs=True)
    life.on(Arrived())
    life.on(Reserved(course_of(life.placed(held=True)), None))

    life.on(Ended(Outcome.CLIENT_GONE))

    (last,) = [effect.release for effect in life.effects if isinstance(effect, Post) and effect.last]
    assert last.turn == TurnEnd("x", "r", was_sent=False)


def test_a_turn_keeps_its_name_in_the_ledger_when_its_request_is_renamed_or_tried_again() -> None:
    life = Life(admit_runs=True)
    life.on(Arrived())
    life.on(NotPlaced(SearchFailed(duplicate=True)))
    life.on(Renamed("y"))
    life.reserve()
    life.on(Sent())
    life.on(Failed(CLOSED))
    first = life.one(ReleaseFirst)
    assert isinstance(first, ReleaseFirst)
    assert [each.turn for each in first.releases] == [None]
    life.reserve("b")
    life.on(Ended(Outcome.CLIENT_GONE))

    (last,) = [effect.release for effect in life.effects if isinstance(effect, Post) and effect.last]
    assert (last.request_id, last.turn) == ("y", TurnEnd("x", "r"))


def test_a_turn_that_waited_for_too_long_is_refused_and_ends() -> None:
    life = Life(admit_runs=True)
    life.park()

    life.on(TurnedAway(Refusal.HELD_TOO_LONG), after_s=60.0)

    assert life.names == ["Post", "Close", "Refuse"]
    assert life.machine.outcome is Outcome.TIMED_OUT


def parked_turn_of_a_tenant() -> Life:
    draws = Draws.of(*[Draw(each, 1) for each in budgets_of("acme", [Limit(Measure.REQUESTS, Period.IN_FLIGHT, 1)])])
    life = Life(admit_runs=True, account=ACCOUNT, draws=draws)
    life.park()
    return life


@pytest.mark.parametrize("goes", [False, True], ids=["while it is parked", "before it is placed"])
def test_a_parked_turn_of_a_tenant_is_released_and_gives_back_what_it_drew(goes: bool) -> None:
    life = parked_turn_of_a_tenant()
    if goes:
        life.on(TurnGoes(), after_s=50.0)
    (kept,) = stored_requests(life.machine, 1000, life.now_s)
    assert (kept.instance_id, kept.state, kept.attempt, kept.drawn) == ("", "held", 1, "acme/requests/in_flight 1")

    life.on(NotPlaced(SearchFailed()) if goes else Ended(Outcome.CLIENT_GONE))

    (last,) = [effect.release for effect in life.effects if isinstance(effect, Post) and effect.last]
    assert last.turn == TurnEnd("x", "r", was_sent=False)
    assert last.used
    assert last.returned is not None and last.returned.costs == (1,)
    assert stored_requests(life.machine, 1000, life.now_s) == ()


def test_a_turn_that_goes_after_it_was_parked_was_admitted_by_its_budgets() -> None:
    life = Life(admit_runs=True, account=ACCOUNT)
    life.on(Arrived())
    first = life.one(Reserve)
    life.on(NotPlaced(SearchFailed(parked=True)))
    life.on(TurnGoes(), after_s=50.0)

    again = life.one(Reserve)
    assert isinstance(first, Reserve) and isinstance(again, Reserve)
    assert (first.search.was_admitted, again.search.was_admitted) == (False, True)


def test_without_admission_of_runs_no_turn_is_entered() -> None:
    life = Life(run=NAME)
    life.on(Arrived())

    assert life.machine.phase is Phase.PLACING
    life.on(Ended(Outcome.CLIENT_GONE))
    assert life.machine.turn is None


# metering --------------------------------------------------------------------------------------------------------
ACCOUNT = "acme ci - m"


def used_in(life: Life) -> list[str]:
    """The usage that the last releases say."""
    posted = [effect.release.used for effect in life.effects if isinstance(effect, Post)]
    return [used for used in posted if used not in ("", KEPT)]


def test_an_answer_is_metered_by_what_its_instance_counted() -> None:
    life = Life(account=ACCOUNT)
    life.dispatch()
    life.on(Sent())
    life.on(FirstToken())
    assert used_in(life) == []

    life.on(Ended(Outcome.COMPLETED, Usage(48, 32, 9)))

    assert used_in(life) == ["1 48 32 9 0 0 0 completed reported"]


def test_expected_tokens_are_metered_of_a_client_that_leaves_within_its_answer() -> None:
    life = Life(account=ACCOUNT, expected_output_tokens=50, stored_tokens=10)
    life.dispatch()
    life.on(Sent())
    life.on(FirstToken())

    life.on(Ended(Outcome.CLIENT_GONE))

    assert used_in(life) == ["1 58 0 50 0 0 0 client_gone expected"]


def test_no_tokens_are_metered_where_no_instance_answered() -> None:
    life = Life(account=ACCOUNT)
    life.dispatch()

    life.on(Ended(Outcome.CLIENT_GONE))

    assert used_in(life) == ["1 0 0 0 1 0 0 client_gone reported"]


def test_a_try_that_failed_is_not_metered_and_the_request_is_once() -> None:
    life = Life(account=ACCOUNT)
    life.dispatch()
    life.on(Sent())
    life.on(Failed(CLOSED))
    released = [each.used for effect in life.effects if isinstance(effect, ReleaseFirst) for each in effect.releases]
    assert released == [KEPT]
    life.reserve("b")
    life.on(FirstToken())

    life.on(Ended(Outcome.COMPLETED, Usage(48, None, 9)))

    assert used_in(life) == ["1 48 0 9 0 0 0 completed reported"]


@pytest.mark.parametrize("phase", [Phase.STAGED, Phase.DECODING])
def test_a_split_request_is_metered_by_its_last_release_alone(phase: Phase) -> None:
    life = Life(split=True, account=ACCOUNT)
    life.stage()
    if phase is Phase.DECODING:
        life.decode()
        life.on(Sent())
        life.on(FirstToken())

    life.on(Ended(Outcome.COMPLETED, Usage(48, None, 9)))

    posted = [effect for effect in life.effects if isinstance(effect, Post)]
    assert [effect.release.used not in ("", KEPT) for effect in posted] == [effect.last for effect in posted]
    assert posted[-1].release.request_id == "x"


def limit_of_tries(life: Life) -> None:
    life.on(NotPlaced(SearchFailed()))


def client_leaves(life: Life) -> None:
    life.on(Ended(Outcome.CLIENT_GONE))


@pytest.mark.parametrize("end", [limit_of_tries, client_leaves])
def test_a_request_that_ends_between_two_tries_is_metered_once(end: Callable[[Life], None]) -> None:
    life = Life(account=ACCOUNT)
    life.dispatch()
    life.on(Sent())
    life.on(Failed(CLOSED))
    assert life.machine.phase is Phase.PLACING
    (kept,) = stored_requests(life.machine, 0, life.now_s)
    assert (kept.request_id, kept.instance_id, kept.attempt, kept.drawn) == ("x", "", 2, "")

    end(life)

    outcome = life.machine.outcome
    assert used_in(life) == [f"1 0 0 0 1 0 0 {outcome} reported"]
    assert life.released[-1] == ("x", 2)
    assert stored_requests(life.machine, 0, life.now_s) == ()


def test_a_held_request_that_the_store_lost_is_metered_if_no_instance_takes_it_again() -> None:
    life = Life(account=ACCOUNT)
    life.hold()
    life.on(ReservationLost())

    life.on(NotPlaced(SearchFailed(full=True)))

    assert used_in(life) == ["1 0 0 0 1 0 0 refused reported"]


def test_what_was_refused_at_its_first_try_is_not_metered() -> None:
    life = Life(account=ACCOUNT)
    life.on(Arrived())

    life.on(NotPlaced(SearchFailed(full=True)))

    assert life.machine.is_done
    assert life.released == []


def test_an_answer_that_cannot_go_on_counts_no_tokens_as_its_instance_failed_it() -> None:
    life = Life(account=ACCOUNT, expected_output_tokens=50)
    life.dispatch()
    life.on(Sent())
    life.on(FirstToken())
    life.on(Failed(CLOSED, sent_tokens=7))

    life.on(NotPlaced(SearchFailed()))

    (used,) = used_in(life)
    assert used.startswith("1 0 0 0 1 0 0 ")


def test_of_a_split_answer_a_record_of_its_own_id_is_kept() -> None:
    life = Life(split=True, account=ACCOUNT)
    life.stage()
    life.decode()
    life.on(Sent())
    life.on(FirstToken())

    own, decode = stored_requests(life.machine, 0, life.now_s)

    assert (own.request_id, own.instance_id) == ("x", "")
    assert decode.request_id == decode_leg_id("x")


def test_no_request_is_metered_without_an_account() -> None:
    life = Life()
    life.dispatch()

    life.on(Ended(Outcome.COMPLETED, Usage(48, 32, 9)))

    assert used_in(life) == []


def passed_on() -> Life:
    return Life(chain=None, account=ACCOUNT)


def test_a_request_of_a_tenant_that_is_passed_on_is_registered_and_released() -> None:
    life = passed_on()
    life.on(Arrived())
    assert life.names == ["Register"]
    assert stored_requests(life.machine, 0, life.now_s) == ()
    life.on(Registered(Drawn((3,))))
    assert life.names == ["Send"]
    assert [each.instance_id for each in stored_requests(life.machine, 0, life.now_s)] == [""]
    life.on(Sent())
    life.on(FirstToken())

    life.on(Ended(Outcome.COMPLETED))

    assert used_in(life) == ["1 0 0 0 0 0 0 completed expected"]


def test_a_retry_of_what_is_passed_on_registers_nothing() -> None:
    life = passed_on()
    life.on(Arrived())
    life.on(Registered(Drawn()))
    life.on(Failed(CLOSED))

    assert life.names == ["LeaveInstance", "CountRetry", "Send"]


def test_what_may_have_been_registered_is_released_and_what_was_refused_is_not() -> None:
    cancelled, refused = passed_on(), passed_on()
    for life in (cancelled, refused):
        life.on(Arrived())

    cancelled.on(Ended(Outcome.CLIENT_GONE))
    refused.on(NotPlaced(SearchFailed(limited=Drawn((0,), 0))))

    assert cancelled.released == [("x", 1)]
    assert refused.released == []
    why = refused.one(Refuse)
    assert isinstance(why, Refuse) and why.why is Refusal.LIMITED


def test_a_request_without_a_tenant_is_passed_on_without_the_store() -> None:
    life = Life(chain=None)

    life.on(Arrived())

    assert life.names == ["Send"]


def test_a_placement_prices_the_loads_of_the_adapter_by_its_rank() -> None:
    search = Life(adapter="sql", adapter_share=4.0).machine._new_search(CHAIN)

    step = next(iter(search.run()))
    assert isinstance(step, Place)
    assert step.placement.adapter_share == 4.0


@pytest.mark.parametrize(("wait", "teaches"), [(AdapterWait(0.1, 0.5), True), (AdapterWait(0.1, 0.5, 1.0), False)])
def test_a_request_that_waited_for_a_slot_teaches_no_ttft(wait: AdapterWait, teaches: bool) -> None:
    life = Life()
    life.dispatch()
    placed = life.placed()
    loads = {"a": InstanceLoad("a", InstanceState.READY, adapter=wait)}
    placed.reply = replace(placed.reply, seen=replace(placed.reply.seen, loads=loads))
    life.machine.placed = placed

    assert (json.loads(life.machine.ttft_sample())["features"] is not None) is teaches
