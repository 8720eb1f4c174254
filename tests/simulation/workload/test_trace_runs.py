from statistics import median

from dualmap.simulation.workload.generators import agents, forks, tasks
from dualmap.simulation.workload.trace_runs import runs_of, turns_of_runs
from dualmap.simulation.workload.traces import Trace, TraceRequest


def turn(session: str, *after: str) -> TraceRequest:
    return TraceRequest(0.0, 10, 1, (0,), session=session, think_s=1.0 if after else None, after=after)


def test_sessions_that_wait_for_each_other_are_one_run_named_by_the_first() -> None:
    turns = (turn("a"), turn("b"), turn("s1", "a"), turn("s2", "a"), turn("a", "s1", "s2"), turn("b"))
    trace = Trace("t", 16, turns)

    runs = runs_of(trace)

    assert runs == {"a": "a", "b": "b", "s1": "a", "s2": "a"}
    assert turns_of_runs(trace, runs) == {"a": 4, "b": 2}


def test_a_request_without_a_session_is_of_no_run() -> None:
    trace = Trace("t", 16, (turn(""), turn("a")))

    assert runs_of(trace) == {"a": "a"}
    assert turns_of_runs(trace, runs_of(trace)) == {"a": 1}


def test_tasks_have_no_sub_agents_and_agents_have() -> None:
    plain, forked = tasks(400, 1), agents(1500, 1)

    assert set(runs_of(plain).items()) == {(session, session) for session in runs_of(plain)}
    runs = runs_of(forked)
    assert len(set(runs.values())) < len(runs)
    assert sum(turns_of_runs(forked, runs).values()) == 1500


def test_forks_are_as_often_and_returns_as_soon_as_published() -> None:
    trace = forks(12_000, 1)
    runs = runs_of(trace)
    begun = {request.session for request in trace.requests if request.think_s is None}
    turns = {run: number for run, number in turns_of_runs(trace, runs).items() if run in begun}
    forked = {run for session, run in runs.items() if session != run}
    gaps_s = [request.think_s for request in trace.requests if request.think_s is not None and not request.after]

    whole = [run for run in turns if turns[run] > 3]
    assert 0.3 < sum(run in forked for run in whole) / len(whole) < 0.55
    assert 30 < median(turns.values()) < 60
    assert 0.94 < sum(gap_s <= 10 for gap_s in gaps_s) / len(gaps_s) < 0.96


def test_an_agent_that_forks_waits_for_all_its_sub_agents() -> None:
    trace = forks(6000, 2)
    joins = [request for request in trace.requests if len(request.after) > 1]

    assert joins
    started = {request.session: request.after for request in trace.requests if len(request.after) == 1}
    for join in joins:
        assert {started[name] for name in join.after if name in started} <= {(join.session,)}
