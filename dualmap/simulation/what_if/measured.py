"""The recorded requests as they were served, in the shape of a simulated run's."""

from __future__ import annotations

from collections.abc import Sequence

from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.request.slo import slo_s
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.classes import rank_of_name
from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.workload.traces import Trace, TraceRequest


def measured_outcomes(trace: Trace, scheduling: SchedulingSettings) -> list[RequestOutcome]:
    """The requests of a recording whose first token was seen, in order of arrival."""
    return [
        _outcome(request, request.measured.ttft_s, request.measured.duration_s, scheduling)
        for request in trace.requests
        if request.measured is not None and request.measured.ttft_s is not None
    ]


def _outcome(request: TraceRequest, ttft_s: float, duration_s: float, scheduling: SchedulingSettings) -> RequestOutcome:
    assert request.measured is not None
    rank = rank_of_name(scheduling.classes, request.priority)
    return RequestOutcome(
        request.arrival_s,
        request.input_tokens,
        request.output_tokens,
        slo_s(scheduling, request.input_tokens, request.slo_ttft_s, rank),
        cached_tokens=request.measured.cached_tokens or 0,
        first_token_s=request.arrival_s + ttft_s,
        finish_s=request.arrival_s + duration_s,
        outcome=Outcome.COMPLETED,
        tenant=request.tenant,
        priority=request.priority,
    )


def share_measured(requests: Sequence[TraceRequest]) -> float:
    """Share of requests whose first token was seen when they were recorded."""
    seen = sum(request.measured is not None and request.measured.ttft_s is not None for request in requests)
    return seen / max(1, len(requests))
