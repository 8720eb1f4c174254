"""The times at which requests of a trace are sent."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush

import pytest

from dualmap.simulation.workload.arrivals import Arrivals, Loop
from dualmap.simulation.workload.traces import Trace, TraceRequest


def turn(arrival_s: float, session: str = "", think_s: float | None = None, *after: str) -> TraceRequest:
    return TraceRequest(arrival_s, 100, 5, (0,), session=session, think_s=think_s, after=after)


def sent(requests: list[TraceRequest], loop: Loop, answer_s: float = 10.0) -> list[tuple[float, int]]:
    """(time, place) of what is sent if every answer takes ``answer_s``."""
    arrivals = Arrivals(Trace("t", 512, tuple(requests)), loop)
    answers: list[tuple[float, int]] = []
    found: list[tuple[float, int]] = []
    while not arrivals.over:
        due_s = arrivals.due_s
        if due_s is not None and (not answers or due_s <= answers[0][0]):
            place = arrivals.take()
            found.append((due_s, place))
            heappush(answers, (due_s + answer_s, place))
        else:
            end_s, place = heappop(answers)
            arrivals.ended(place, end_s)
    return found


TWO_SESSIONS = [turn(0, "a"), turn(1, "b"), turn(2, "a", 3.0), turn(3), turn(4, "b", 0.5)]


def test_without_think_times_answers_do_not_matter() -> None:
    requests = [turn(0.5), turn(1, "a"), turn(1, "a"), turn(2)]

    assert sent(requests, Loop()) == [(0.5, 0), (1, 1), (1, 2), (2, 3)]


def test_a_turn_comes_its_think_time_after_the_answer_before_it() -> None:
    assert sent(TWO_SESSIONS, Loop()) == [(0, 0), (1, 1), (3, 3), (11.5, 4), (13, 2)]
    assert sent(TWO_SESSIONS, Loop(open=True)) == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_turn_whose_former_ones_are_not_in_the_trace_comes_at_its_own_time() -> None:
    assert sent([turn(2, "a", 3.0), turn(4, "a", 1.0)], Loop()) == [(2, 0), (13, 1)]


def test_a_session_goes_on_when_all_that_it_spawned_have_ended() -> None:
    # given a session that spawns two, one of which takes two turns
    spawned = [turn(1, "a.1", 0.0, "a"), turn(2, "a.2", 0.2, "a"), turn(3, "a.2", 1.0)]
    requests = [turn(0, "a"), *spawned, turn(9, "a", 0.5, "a.1", "a.2")]

    assert sent(requests, Loop()) == [(0, 0), (10, 1), (10.2, 2), (21.2, 3), (31.7, 4)]
    # one client plays all of it, then the next session
    assert sent([*requests, turn(9, "b")], Loop(concurrency=1))[-1] == (41.7, 5)


def test_clients_are_always_busy_but_while_they_think() -> None:
    # single requests: each client takes the next one when its answer came
    assert sent([turn(0)] * 5, Loop(concurrency=2)) == [(0, 0), (0, 1), (10, 2), (10, 3), (20, 4)]
    # sessions: a client plays one to its end, whatever the times of the trace
    assert sent(TWO_SESSIONS, Loop(concurrency=1)) == [(0, 0), (13, 2), (23, 1), (33.5, 4), (43.5, 3)]
    # a turn without a think time follows the one before at once
    assert sent([turn(0, "a"), turn(50, "a")], Loop(concurrency=3)) == [(0, 0), (10, 1)]


@pytest.mark.parametrize("loop", [Loop(seconds=12.0), Loop(concurrency=1, seconds=12.0), Loop(open=True, seconds=2.0)])
def test_nothing_is_sent_after_the_end(loop: Loop) -> None:
    found = sent(TWO_SESSIONS, loop)

    assert found and all(at_s < loop.seconds for at_s, _ in found) and len(found) < len(TWO_SESSIONS)


def test_a_client_whose_next_turn_would_come_after_the_end_is_cut_off() -> None:
    arrivals = Arrivals(Trace("t", 512, tuple(TWO_SESSIONS)), Loop(concurrency=1, seconds=12.0))

    assert not arrivals.is_cut_off(0, 8.0)
    assert arrivals.is_cut_off(0, 9.0), "the next turn of a would come 3 s later"
    assert not arrivals.is_cut_off(2, 100.0), "nothing follows the last turn of a"


def test_seconds_count_from_the_first_request() -> None:
    assert sent([turn(100), turn(104), turn(106)], Loop(seconds=5.0)) == [(100, 0), (104, 1)]


def test_every_request_is_sent_once() -> None:
    for loop in (Loop(), Loop(concurrency=1), Loop(concurrency=2), Loop(concurrency=99), Loop(open=True)):
        assert sorted(place for _, place in sent(TWO_SESSIONS, loop)) == [0, 1, 2, 3, 4]


def test_what_waits_for_answers_is_a_closed_loop() -> None:
    trace, alone = Trace("t", 512, tuple(TWO_SESSIONS)), Trace("t", 512, (turn(0), turn(1)))

    assert Loop().is_closed(trace) and not Loop().is_closed(alone) and not Loop(open=True).is_closed(trace)
    assert Loop(concurrency=3).is_closed(alone)


def test_where_there_are_only_lines_all_of_them_come() -> None:
    arrivals = Arrivals(
        Trace("t", 512, tuple(replace(turn(9.0), priority="batch") for _ in range(2))), Loop(lines="batch")
    )

    assert [arrivals.over, arrivals.take_line(), arrivals.take_line(), arrivals.take_line()] == [False, 0, 1, None]
    for place in (0, 1):
        assert not arrivals.over
        arrivals.line_ended()
        arrivals.ended(place, 10.0)
    assert arrivals.over


def test_lines_are_taken_as_there_is_room_until_the_last_of_the_others_has_come() -> None:
    lines = [replace(turn(9.0), priority="batch") for _ in range(4)]
    arrivals = Arrivals(Trace("t", 512, (turn(1), lines[0], turn(2), *lines[1:])), Loop(lines="batch"))

    assert arrivals.due_s == 1
    assert [arrivals.take_line(), arrivals.take_line()] == [1, 3]
    assert arrivals.lines_under_way == 2
    assert [arrivals.take(), arrivals.take()] == [0, 2]
    assert arrivals.over
    assert arrivals.take_line() is None
    for place in (1, 3):
        arrivals.line_ended()
        arrivals.ended(place, 10.0)
    assert arrivals.lines_under_way == 0
