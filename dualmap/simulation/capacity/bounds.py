"""Bounds that no scheduler can pass: the *ideal goodput* of a trace, and the *sustainable rate* of traffic like it.

The ideal has every hit that one endless cache would give, perfect balance and no queueing. The least cost of a request,
by the engine model's own step costs, if every step that it takes part in is full:

* prefill: linear layers of its uncached tokens and attention of these to everything before them;
* decode: linear layers, host work and reading its context, once for every token after the first;
* for each token computed its part of a full step's overhead. Reading the weights hides behind a full step's arithmetic.

An ideal that must keep a share of the requests on time leaves out the most expensive ones completely. The others must
have their first tokens by the last arrival plus SLO, and N instances have no more than N times that span to compute
them. Decoding cannot be postponed meanwhile: an engine step gives every decoding sequence one token, and no step takes
longer than a full batch at the longest prompt with full KV memory. So at the end of the span each request has generated
at least the tokens that fit between its deadline and that end at the longest step: this much of its decoding counts
too, and no more, so that the ideal goodput holds for short traces as well. The shorter the trace the more decoding lies
behind its end; the sustainable rate counts all of it, and is what an endless trace would have. So the goodput of a
short trace can be above the sustainable rate, never above the ideal goodput.

The one assumption is that engines preempt no request: preemption postpones decoding at the price of computing it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from dualmap.simulation.capacity.goodput import ON_TIME_SHARE
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.step_time import attention_pairs
from dualmap.simulation.workload.trace_figures import cached_tokens_if_infinite
from dualmap.simulation.workload.traces import Trace

_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class IdealRequest:
    """One request's least cost, in engine seconds."""

    arrival_s: float
    """Time since the first counted request, at the trace's own rate."""
    prefill_s: float
    decode_tokens: int
    token_s: float
    """One decoded token, its context left out."""
    first_context_s: float
    """Reading the context for the first decoded token; every further one reads ``context_s`` more."""
    context_s: float

    def work_s(self, decoded_tokens: int) -> float:
        """Prefill and the first ``decoded_tokens`` of decoding."""
        tokens = min(self.decode_tokens, max(0, decoded_tokens))
        contexts_s = tokens * self.first_context_s + self.context_s * (tokens * (tokens - 1) // 2)
        return self.prefill_s + tokens * self.token_s + contexts_s


def ideal_requests(trace: Trace, engine: EngineConfig, skip: int = 0) -> list[IdealRequest]:
    """The least costs of the trace's requests, the first ``skip`` left out."""
    costs = engine.costs
    token_s = costs.full_step_token_s(engine.max_num_batched_tokens)
    cached = cached_tokens_if_infinite(trace)
    start_s = trace.requests[skip].arrival_s
    return [
        IdealRequest(
            arrival_s=request.arrival_s - start_s,
            prefill_s=token_s * (request.input_tokens - hit)
            + costs.attention_pair_s * attention_pairs(hit, request.input_tokens - hit),
            decode_tokens=max(0, request.output_tokens - 1),
            token_s=token_s + costs.sequence_s,
            first_context_s=costs.context_token_s * (request.input_tokens + 1),
            context_s=costs.context_token_s,
        )
        for request, hit in zip(trace.requests[skip:], cached[skip:], strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that no scheduler can pass, in requests per second."""

    ideal_goodput_per_s: float
    """The rate above which none keeps the share of this trace on time; infinite when all fit into one SLO."""
    sustainable_per_s: float
    """See ``sustainable_rate``."""


def bounds_of(
    trace: Trace, engine: EngineConfig, instances: int, slo_s: float, *, share: float = ON_TIME_SHARE, skip: int = 0
) -> Bounds:
    """Both bounds for ``share`` of the requests, the first ``skip`` left out."""
    requests = ideal_requests(trace, engine, skip)
    kept = _kept(share, len(requests))
    squeeze = _ideal_squeeze(requests, kept, instances, slo_s, longest_step_s(trace, engine))
    ideal_per_s = float("inf") if squeeze is None else squeeze * trace.rate_per_s
    return Bounds(ideal_per_s, _sustainable_per_s(requests, kept, instances))


def sustainable_rate(
    trace: Trace, engine: EngineConfig, instances: int, *, share: float = ON_TIME_SHARE, skip: int = 0
) -> float:
    """The rate above which no scheduler keeps ``share`` of such traffic on time permanently; with all of it, the rate
    above which queues grow without end, in any order."""
    requests = ideal_requests(trace, engine, skip)
    return _sustainable_per_s(requests, _kept(share, len(requests)), instances)


def _sustainable_per_s(requests: Sequence[IdealRequest], kept: int, instances: int) -> float:
    works_s = sorted(one.work_s(one.decode_tokens) for one in requests)
    return instances * len(works_s) / sum(works_s[:kept])


def longest_step_s(trace: Trace, engine: EngineConfig) -> float:
    """No step of a run of this trace takes longer."""
    longest_prompt = max(request.input_tokens for request in trace.requests)
    return engine.costs.step_s(
        prefill_tokens=engine.max_num_batched_tokens,
        prefill_pairs=engine.max_num_batched_tokens * longest_prompt,
        sequences=engine.max_num_seqs,
        context_tokens=engine.kv_capacity_tokens + engine.max_num_seqs,
    )


def _ideal_squeeze(
    requests: Sequence[IdealRequest], kept: int, instances: int, slo_s: float, step_s: float
) -> float | None:
    """The largest divisor of the trace's times with the cheapest ``kept`` on time; None: without limit."""
    span_s = requests[-1].arrival_s

    def fits(squeeze: float) -> bool:
        """Whether the cheapest of the trace, its times divided by ``squeeze``, fit the span."""
        end_s = span_s / squeeze + slo_s
        works_s = [one.work_s(int((span_s - one.arrival_s) / squeeze / step_s)) for one in requests]
        return sum(sorted(works_s)[:kept]) <= instances * end_s

    prefills_s = sum(sorted(one.prefill_s for one in requests)[:kept])
    if prefills_s <= instances * slo_s or span_s == 0:
        return None
    low, high = 0.0, span_s / (prefills_s / instances - slo_s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high


def _kept(share: float, requests: int) -> int:
    """The fewest requests that are ``share`` of all; rounding errors of the product do not add one."""
    return max(1, ceil(share * requests - 1e-9))


def short_trace_note(names: Sequence[str]) -> str:
    """A sentence for reports on those whose goodput exceeds the sustainable rate; empty without any."""
    if not names:
        return ""
    return (
        f"Above the sustainable rate: {', '.join(names)}. Only so short a trace allows that: part of its decoding "
        "comes after the last arrival."
    )
