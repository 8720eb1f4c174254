"""The metrics of a request: functions that count its placement, first token, end and usage."""

from __future__ import annotations

from typing import Final

from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.prompts.prompt import ReadPrompt
from dualmap.router.telemetry.metrics import PoolMetrics, TurnMetrics
from dualmap.scheduling.placing.placement import SearchCourse
from dualmap.scheduling.request.machine import ON_AN_INSTANCE, RequestMachine
from dualmap.scheduling.request.outcome import ANSWERED
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.tier_load import NO_LOAD

_PREFILL: Final = Leg.PREFILL


def count_placed(course: SearchCourse, machine: RequestMachine, metrics: PoolMetrics) -> None:
    """Count a placement. It judges what the placement means, for the head of the answer too."""
    placed = course.placed
    metrics.reasons[placed.decision.reason].value += 1
    (metrics.split if placed.reply.chosen.leg is _PREFILL else metrics.whole).value += 1
    (metrics.one_trip if course.trips == 1 else metrics.more_trips).value += 1
    if course.stale_rounds:
        metrics.stale.inc(course.stale_rounds)
    if machine.tries <= 1 and machine.placed_s is not None and machine.awaits_since_s is None:
        metrics.decision_s.observe(machine.placed_s - machine.parked_s)
    if machine.grant is None and machine.phase in ON_AN_INSTANCE:
        metrics.hold_s.observe(machine.held_s)


def count_first_token(machine: RequestMachine, metrics: PoolMetrics) -> None:
    """Count the first token that the client gets, at the age at which it came."""
    first_token_s, decode = machine.first_token_s, machine.decode
    assert first_token_s is not None
    metrics.count_ttft(first_token_s, machine.expected_ttft_s)
    if decode is not None and decode.placed_s is not None:
        metrics.transfer_s.observe(first_token_s - decode.placed_s)


def count_end(machine: RequestMachine, metrics: PoolMetrics) -> None:
    """Count how the request ended."""
    outcome, ended_s, usage, chain = machine.outcome, machine.ended_s, machine.usage, machine.spec.chain
    assert outcome is not None
    assert ended_s is not None
    metrics.in_flight.value -= 1
    metrics.outcomes[outcome].value += 1
    if machine.placed is not None and (loads := machine.placed.reply.chosen.loads) is not NO_LOAD and chain is not None:
        metrics.count_tiers(loads, chain.block_tokens)
    if outcome in ANSWERED and chain is not None:
        metrics.count_answer(ended_s, machine.first_token_s, None if usage is None else usage.output_tokens)


def count_turn(machine: RequestMachine, metrics: TurnMetrics) -> None:
    """Count where the time of a turn went: waiting for memory, to its first token, and from then to its end."""
    prefill_ms, decode_ms = machine.turn_times_ms()
    waited_s = machine.parked_s if machine.searches else machine.ended_s or 0.0  # to its end, where it never went
    metrics.count_end(waited_s, prefill_ms / 1000, decode_ms / 1000)


def count_usage(
    machine: RequestMachine, pool: ServedPool, prompt: ReadPrompt | None, expected_cached: int, prompts: int = 1
) -> None:
    """Count what was expected of the prompt beside what the instance counted, where it reported that. Of several
    ``prompts`` vLLM reports the cached tokens of one."""
    usage, metrics, chain = machine.usage, pool.metrics, machine.spec.chain
    if chain is None:
        return
    expected_tokens = machine.spec.stored_tokens + chain.prompt_tokens
    is_answered = machine.outcome in ANSWERED
    if is_answered:
        metrics.prompt_tokens_expected.value += expected_tokens
        metrics.hit_tokens_expected.value += expected_cached
    if usage is not None and usage.prompt_tokens is not None and prompt is not None:
        if prompt.count is not None and pool.tokenizer is not None:
            pool.tokenizer.reported(prompt.count, chain.prompt_tokens, usage.prompt_tokens, machine.instance_id)
        cached_tokens = usage.cached_tokens if prompts == 1 else None
        metrics.compare_cached(expected_cached, cached_tokens)
        if cached_tokens is not None:
            metrics.prompt_tokens_reported.value += usage.prompt_tokens
            metrics.hit_tokens_reported.value += cached_tokens
            return
    if is_answered:
        metrics.prompt_tokens_unreported.value += expected_tokens
        metrics.hit_tokens_unreported.value += expected_cached
