"""What clients are told of their limits: header fields on every answer, and the refusal when one is met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from dualmap.router.errors import QuotaSpentError, RateLimitError, RouterError
from dualmap.router.prompts.inference_request import MESSAGES_PATH
from dualmap.scheduling.tenants.budgets import Draw, Drawn, Measure, Period

IN_FLIGHT_RETRY_S: Final = 1.0
"""When to try again is not known where it depends on what is in flight."""

_WORDS: Final = {
    Measure.REQUESTS: "requests",
    Measure.PROMPT_TOKENS: "prompt tokens",
    Measure.OUTPUT_TOKENS: "output tokens",
    Measure.TOKENS: "tokens",
}
_PERIODS: Final = {
    Period.MINUTE: "a minute",
    Period.DAY: "a day",
    Period.MONTH: "a month",
    Period.IN_FLIGHT: "at a time",
}
_OPENAI: Final = {Measure.REQUESTS: "requests", Measure.TOKENS: "tokens"}
_ANTHROPIC: Final = {
    Measure.REQUESTS: "requests",
    Measure.TOKENS: "tokens",
    Measure.PROMPT_TOKENS: "input-tokens",
    Measure.OUTPUT_TOKENS: "output-tokens",
}


def limit_fields(path: str, draws: Sequence[Draw], drawn: Drawn, now: datetime) -> list[tuple[bytes, bytes]]:
    """The fields of an answer on ``path``, as the API's own service has them. Of several limits on the same figure, the
    one of which the least is left is told."""
    tightest: dict[Measure, tuple[int, Draw]] = {}
    for draw, left in zip(draws, drawn.left, strict=True):
        measure = draw.limit.measure
        if draw.limit.period is Period.MINUTE and (measure not in tightest or left < tightest[measure][0]):
            tightest[measure] = left, draw
    fields: list[tuple[bytes, bytes]] = []
    for measure, (left, draw) in tightest.items():
        reset_s = max(0.0, (draw.capacity - left) / draw.leak_per_s)
        if path == MESSAGES_PATH:
            fields += _anthropic(measure, draw.capacity, left, now + timedelta(seconds=reset_s))
        elif measure in _OPENAI:
            fields += _openai(measure, draw.capacity, left, reset_s)
    return fields


def _openai(measure: Measure, limit: int, left: int, reset_s: float) -> list[tuple[bytes, bytes]]:
    figures = {"limit": str(limit), "remaining": str(max(0, left)), "reset": duration(reset_s)}
    return [(f"x-ratelimit-{name}-{_OPENAI[measure]}".encode(), text.encode()) for name, text in figures.items()]


def _anthropic(measure: Measure, limit: int, left: int, full_at: datetime) -> list[tuple[bytes, bytes]]:
    reset = full_at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    figures = {"limit": str(limit), "remaining": str(max(0, left)), "reset": reset}
    kind = _ANTHROPIC[measure]
    return [(f"anthropic-ratelimit-{kind}-{name}".encode(), text.encode()) for name, text in figures.items()]


def duration(seconds: float) -> str:
    """As OpenAI writes it: ``12ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = round(seconds, 3)
    minutes, rest = divmod(whole, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


def limits_told(draws: Sequence[Draw], drawn: Drawn | None) -> tuple[str, ...]:
    """The rest of each budget that a request would have drawn from, in words, and which one kept it out; empty where
    none did."""
    if drawn is None or drawn.unmet is None:
        return ()
    told = []
    for place, (draw, left) in enumerate(zip(draws, drawn.left, strict=False)):
        limit = draw.limit
        whose = f" for {limit.of.replace(':', ' ')}" if limit.of else ""
        before = f"{max(0, left + draw.cost):,} of {limit.amount:,} {_WORDS[limit.measure]} {_PERIODS[limit.period]}"
        end = ": too few" if place == drawn.unmet else ""
        told.append(f"{before}{whose} were left, and it would have taken {draw.cost:,}{end}")
    return tuple(told)


def over_limit(tenant: str, draws: Sequence[Draw], drawn: Drawn) -> RouterError:
    """The error for a request that a limit keeps out."""
    assert drawn.unmet is not None
    draw = draws[drawn.unmet]
    limit, left = draw.limit, drawn.left[drawn.unmet] + draw.cost
    what = f"{limit.amount:,} {_WORDS[limit.measure]} {_PERIODS[limit.period]}"
    whose = f"tenant {tenant}" + (f" for {limit.of.replace(':', ' ')}" if limit.of else "")
    kind = "requests" if limit.measure is Measure.REQUESTS else "tokens"
    met = f"the limit of {whose} is {what}"
    if draw.never_fits:
        return RateLimitError(
            f"{met}, and this request alone takes {draw.cost:,}; shorten it, or raise the limit", counted=kind
        )
    here = "" if draw.division is None else " in this pool"
    needs = f"{met}: {max(0, left):,} are left{here}, and this request takes {draw.cost:,}"
    if limit.period in (Period.DAY, Period.MONTH) and not drawn.wait_s:
        when = "tomorrow" if limit.period is Period.DAY else "next month"
        return QuotaSpentError(f"{needs}; it is reset {when} (UTC), or raise the quota")
    if limit.period is Period.IN_FLIGHT:
        return RateLimitError(
            f"{needs}; try again when others have ended", counted=kind, retry_after_s=IN_FLIGHT_RETRY_S
        )
    return RateLimitError(f"{needs}; try again in {duration(drawn.wait_s)}", counted=kind, retry_after_s=drawn.wait_s)
