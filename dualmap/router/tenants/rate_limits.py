"""Reports of limits to clients: header fields on every answer, and the refusal when one is met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import add
from typing import Final, NamedTuple, Protocol

from dualmap.router.errors import QuotaSpentError, RateLimitError, RouterError
from dualmap.router.prompts.inference_request import MESSAGES_PATH
from dualmap.scheduling.tenants.budgets import BudgetGroup, Drawn, Draws, Limit, Measure, Period

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
_FIGURES: Final = ("limit", "remaining", "reset")
REPORTED_EACH_S: Final = 1.0
"""The fields of an answer are at most so old."""
_MOST_REPORTS: Final = 4096


def _names(form: str, kind: str) -> tuple[bytes, bytes, bytes]:
    limit, left, reset = [form.format(kind=kind, figure=figure).encode() for figure in _FIGURES]
    return limit, left, reset


_OPENAI_FIELDS: Final = {
    Measure.REQUESTS: _names("x-ratelimit-{figure}-{kind}", "requests"),
    Measure.TOKENS: _names("x-ratelimit-{figure}-{kind}", "tokens"),
}
_ANTHROPIC_FIELDS: Final = {
    Measure.REQUESTS: _names("anthropic-ratelimit-{kind}-{figure}", "requests"),
    Measure.TOKENS: _names("anthropic-ratelimit-{kind}-{figure}", "tokens"),
    Measure.PROMPT_TOKENS: _names("anthropic-ratelimit-{kind}-{figure}", "input-tokens"),
    Measure.OUTPUT_TOKENS: _names("anthropic-ratelimit-{kind}-{figure}", "output-tokens"),
}


LIMIT_FIELDS: Final = frozenset(
    name for fields in (_OPENAI_FIELDS, _ANTHROPIC_FIELDS) for names in fields.values() for name in names
)
"""All that an answer may have."""


class _ReportedLimit(NamedTuple):
    """A limit in the fields of an answer."""

    limit: tuple[bytes, bytes]
    """The field that says what it is, which is the same on all answers."""
    left_field: bytes
    reset_field: bytes
    place: int
    """The place of the budget in the group."""
    amount: int


@lru_cache(maxsize=4096)
def _reported_limits(group: BudgetGroup, is_messages: bool) -> tuple[tuple[_ReportedLimit, ...], ...]:
    """The limits a minute of a group, those on the same figure together."""
    names, found = _ANTHROPIC_FIELDS if is_messages else _OPENAI_FIELDS, dict[Measure, list[_ReportedLimit]]()
    for place, budget in enumerate(group.budgets):
        limit = budget.limit
        if limit.period is Period.MINUTE and limit.measure in names:
            limit_field, left_field, reset_field = names[limit.measure]
            limit_header = limit_field, b"%d" % limit.amount
            reported = _ReportedLimit(limit_header, left_field, reset_field, place, limit.amount)
            found.setdefault(limit.measure, []).append(reported)
    return tuple(map(tuple, found.values()))


def limit_fields(path: str, draws: Draws, drawn: Drawn, now: datetime) -> list[tuple[bytes, bytes]]:
    """The fields of an answer on ``path``, as the API's own service has them. Of several limits on the same figure, the
    one of which the least is left is told."""
    is_messages, left_of = path == MESSAGES_PATH, drawn.left
    fields: list[tuple[bytes, bytes]] = []
    for first, *others in _reported_limits(draws.group, is_messages):
        limit, left_field, reset_field, place, amount = (
            min(first, *others, key=lambda each: left_of[each.place]) if others else first
        )
        left, reset_s = left_of[place], drawn.unused_in_s(place, amount)
        reset = _reset_text(reset_s, now, is_messages=True) if is_messages else duration(reset_s).encode()
        fields += (limit, (left_field, b"%d" % left if left > 0 else b"0"), (reset_field, reset))
    return fields


class Drawing(Protocol):
    """A request that has drawn."""

    @property
    def drawn(self) -> Drawn | None: ...


_MadeFields = tuple[float, Sequence[tuple[bytes, bytes]]]
"""When fields are made again, and they."""
_NONE_MADE: Final[_MadeFields] = -math.inf, ()


class LimitReports:
    """The fields about limits on the answers of a replica, made once a second for the requests that draw from the same
    budgets: to write them takes longer than to draw."""

    def __init__(self) -> None:
        self._made: dict[BudgetGroup, _MadeFields] = {}
        self._made_for_messages: dict[BudgetGroup, _MadeFields] = {}

    def fields(self, path: str, draws: Draws, request: Drawing, now_s: float) -> Sequence[tuple[bytes, bytes]]:
        """The fields of an answer on ``path``, at a time of a monotonic clock."""
        made = self._made if path != MESSAGES_PATH else self._made_for_messages
        until_s, fields = made.get(draws.group, _NONE_MADE)
        if now_s < until_s:
            return fields
        drawn = request.drawn
        if drawn is None or not drawn.left:
            return fields
        if len(made) >= _MOST_REPORTS:
            made.clear()
        fields = limit_fields(path, draws, drawn, datetime.now(UTC))
        made[draws.group] = now_s + REPORTED_EACH_S, fields
        return fields


def refused_fields(path: str, draws: Draws, drawn: Drawn, now: datetime) -> list[tuple[bytes, bytes]]:
    """The fields of an answer that refuses a request, which keeps nothing of what it would have drawn. The limit that
    keeps it out is told whatever its period is, in place of those a minute on the same figure."""
    before = replace(drawn, left=tuple(map(add, drawn.left, draws.costs)))
    fields = dict(limit_fields(path, draws, before, now))
    if drawn.unmet is not None:
        is_messages, limit = path == MESSAGES_PATH, draws.group.budgets[drawn.unmet].limit
        names = _ANTHROPIC_FIELDS if is_messages else _OPENAI_FIELDS
        limit_field, left_field, reset_field = names.get(limit.measure, names[Measure.TOKENS])
        reset_s = _reset_s(limit, before, drawn.unmet, now)
        fields[limit_field] = b"%d" % limit.amount
        fields[left_field] = b"%d" % max(0, before.left[drawn.unmet])
        fields[reset_field] = _reset_text(reset_s, now, is_messages=is_messages)
    return [*fields.items()]


def _reset_s(limit: Limit, drawn: Drawn, place: int, now: datetime) -> float:
    """Time until nothing is used of a limit, as far as it is known."""
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    match limit.period:
        case Period.MINUTE:
            return drawn.unused_in_s(place, limit.amount)
        case Period.DAY:
            return (midnight + timedelta(days=1) - now).total_seconds()
        case Period.MONTH:
            return ((midnight.replace(day=1) + timedelta(days=32)).replace(day=1) - now).total_seconds()
        case Period.IN_FLIGHT:
            return IN_FLIGHT_RETRY_S


def _reset_text(reset_s: float, now: datetime, *, is_messages: bool) -> bytes:
    return (_time_text(now + timedelta(seconds=reset_s)) if is_messages else duration(reset_s)).encode()


def _time_text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def duration(seconds: float) -> str:
    """A time as OpenAI writes it: ``12ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest_ms = divmod(round(seconds * 1000), 60_000)
    whole, part_ms = divmod(rest_ms, 1000)
    rest = f"{whole}.{part_ms:03}".rstrip("0") if part_ms else str(whole)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def limit_sentences(draws: Draws | None, drawn: Drawn | None) -> tuple[str, ...]:
    """The rest of each budget that a request would have drawn from, in words, and which one kept it out; empty where
    none did."""
    if draws is None or drawn is None or drawn.unmet is None:
        return ()
    sentences = []
    for place, (draw, left) in enumerate(zip(draws.each, drawn.left, strict=False)):
        limit = draw.budget.limit
        whose = f" for {limit.of.replace(':', ' ')}" if limit.of else ""
        before = f"{max(0, left + draw.cost):,} of {limit.amount:,} {_WORDS[limit.measure]} {_PERIODS[limit.period]}"
        end = ": too few" if place == drawn.unmet else ""
        sentences.append(f"{before}{whose} were left, and it would have taken {draw.cost:,}{end}")
    return tuple(sentences)


def over_limit(tenant: str, draws: Draws, drawn: Drawn) -> RouterError:
    """The error for a request that a limit keeps out."""
    assert drawn.unmet is not None
    draw = draws.each[drawn.unmet]
    limit, left = draw.budget.limit, drawn.left[drawn.unmet] + draw.cost
    what = f"{limit.amount:,} {_WORDS[limit.measure]} {_PERIODS[limit.period]}"
    whose = f"tenant {tenant}" + (f" for {limit.of.replace(':', ' ')}" if limit.of else "")
    kind = "requests" if limit.measure is Measure.REQUESTS else "tokens"
    met = f"the limit of {whose} is {what}"
    if draw.never_fits:
        return RateLimitError(
            f"{met}, and this request alone takes {draw.cost:,}; shorten it, or raise the limit", counted=kind
        )
    here = "" if draw.budget.division is None else " in this pool"
    needs = f"{met}: {max(0, left):,} are left{here}, and this request takes {draw.cost:,}"
    if limit.period in (Period.DAY, Period.MONTH) and not drawn.wait_s:
        when = "tomorrow" if limit.period is Period.DAY else "next month"
        return QuotaSpentError(f"{needs}; it is reset {when} (UTC), or raise the quota")
    if limit.period is Period.IN_FLIGHT:
        return RateLimitError(
            f"{needs}; try again when others have ended", counted=kind, retry_after_s=IN_FLIGHT_RETRY_S
        )
    return RateLimitError(f"{needs}; try again in {duration(drawn.wait_s)}", counted=kind, retry_after_s=drawn.wait_s)
