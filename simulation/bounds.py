"""What no scheduler can beat: perfect reuse and perfect balance.

Every request's prefill costs at least the arithmetic of its uncached tokens, with the hit that one endless cache
shared by all instances would give it. N instances can do N seconds of it a second. Decoding, step overheads and
waiting are left out of the bound of goodput, so it is above what is possible, never below. The sustainable rate
adds each request's own decoding: above it queues grow without end, whatever the order.
"""

from __future__ import annotations

from simulation.engine_types import EngineConfig
from simulation.generators.calibration import cached_tokens_if_infinite
from simulation.step_time import attention_pairs
from simulation.traces import Trace


def prefill_costs_s(trace: Trace, engine: EngineConfig, skip: int = 0) -> list[float]:
    """Least engine time of each request's prefill, the first ``skip`` left out."""
    costs = engine.costs
    cached = cached_tokens_if_infinite(trace)
    return [
        costs.token_s * (request.input_tokens - hit)
        + costs.attention_pair_s * attention_pairs(hit, request.input_tokens - hit)
        for request, hit in zip(trace.requests[skip:], cached[skip:], strict=True)
    ]


def goodput_bound(
    trace: Trace, engine: EngineConfig, instances: int, slo_s: float, *, wanted_share: float = 0.9, skip: int = 0
) -> float:
    """No scheduler can have ``wanted_share`` on time above this rate."""
    costs_s = sorted(prefill_costs_s(trace, engine, skip))
    needed_s = sum(costs_s[: int(wanted_share * len(costs_s))])
    span_s = needed_s / instances - slo_s
    return len(costs_s) / span_s if span_s > 0 else float("inf")


def sustainable_rate(trace: Trace, engine: EngineConfig, instances: int, *, skip: int = 0) -> float:
    """Above this rate not every request can be served, however late: prefill and decode fill all instances.

    Weights and overheads of steps are left out: they are shared by as many sequences as run together.
    """
    costs = engine.costs
    requests = trace.requests[skip:]
    decode_s = sum(
        request.output_tokens * (costs.sequence_s + costs.token_s)
        + costs.context_token_s * request.output_tokens * (request.input_tokens + request.output_tokens / 2)
        for request in requests
    )
    return instances * len(requests) / (sum(prefill_costs_s(trace, engine, skip)) + decode_s)
