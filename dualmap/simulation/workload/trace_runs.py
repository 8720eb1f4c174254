"""Runs of a trace: the sessions that wait for each other, which are one agent's with its sub-agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dualmap.simulation.workload.traces import Trace


def runs_of(trace: Trace) -> Mapping[str, str]:
    """The run of each session, by the name of the session that it began with. Requests without a session have none."""
    first: dict[str, str] = {}
    begun: dict[str, int] = {}

    def run_of(session: str) -> str:
        while first[session] != session:
            first[session] = first[first[session]]
            session = first[session]
        return session

    for request in trace.requests:
        if not request.session:
            continue
        for session in (request.session, *request.after):
            if first.setdefault(session, session) == session:
                begun.setdefault(session, len(begun))
        for session in request.after:
            one, other = run_of(request.session), run_of(session)
            if one != other:
                earlier, later = (one, other) if begun[one] < begun[other] else (other, one)
                first[later] = earlier
    return {session: run_of(session) for session in first}


def turns_of_runs(trace: Trace, runs: Mapping[str, str]) -> Mapping[str, int]:
    """The number of turns that each run of the trace has."""
    return Counter(runs[request.session] for request in trace.requests if request.session)
