"""Shares on time: by requests, by prompt tokens, by length of the prompt, and with the time per token as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

TPOT_SLO_S = 0.1
"""Time per output token that a reader notices: the second SLO beside that of the first token."""
TIGHT_TPOT_SLO_S = 0.05
"""The SLO that prefill and decode on different instances are to keep."""
QUARTILES = 4

Quartiles = tuple[float, float, float, float]


class Served(Protocol):
    """A request's end, as far as these shares need it."""

    @property
    def input_tokens(self) -> int: ...

    @property
    def on_time(self) -> bool: ...

    @property
    def answered(self) -> bool: ...

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None: there was no second, or no answer."""


@dataclass(frozen=True, slots=True)
class OnTimeShares:
    """Shares of all requests, 0..1; refused ones are not on time."""

    by_requests: float
    by_prompt_tokens: float
    by_length: Quartiles
    """Share by quartile of prompt length, the shortest quarter of the requests first."""
    both_slos: float
    """Share of requests on time whose answer is no slower a token than the second SLO (none given: ``TPOT_SLO_S``)."""
    refused: float
    refused_by_length: Quartiles
    both_tight: float = 0.0
    """Share of requests on time whose answer is no slower than ``TIGHT_TPOT_SLO_S`` a token."""

    @classmethod
    def of(cls, served: Sequence[Served], slo_tpot_s: float = TPOT_SLO_S) -> OnTimeShares:
        tokens = sum(one.input_tokens for one in served)
        quarters = _quarters(served)
        return cls(
            by_requests=_share(served, lambda one: one.on_time),
            by_prompt_tokens=sum(one.input_tokens for one in served if one.on_time) / max(1, tokens),
            by_length=_each(quarters, lambda one: one.on_time),
            both_slos=_share(served, lambda one: meets_both(one, slo_tpot_s)),
            refused=_share(served, lambda one: not one.answered),
            refused_by_length=_each(quarters, lambda one: not one.answered),
            both_tight=_share(served, lambda one: meets_both(one, TIGHT_TPOT_SLO_S)),
        )


def meets_both(one: Served, tpot_slo_s: float = TPOT_SLO_S) -> bool:
    return one.on_time and (one.tpot_s is None or one.tpot_s <= tpot_slo_s)


def _quarters(served: Sequence[Served]) -> list[Sequence[Served]]:
    """The quarters, as even as their number allows; requests of one length stay in order of arrival."""
    ordered = sorted(served, key=lambda one: one.input_tokens)
    bounds = [len(ordered) * quarter // QUARTILES for quarter in range(QUARTILES + 1)]
    return [ordered[bounds[quarter] : bounds[quarter + 1]] for quarter in range(QUARTILES)]


def _each(quarters: Sequence[Sequence[Served]], condition: Callable[[Served], bool]) -> Quartiles:
    first, second, third, fourth = (_share(quarter, condition) for quarter in quarters)
    return first, second, third, fourth


def _share(served: Sequence[Served], condition: Callable[[Served], bool]) -> float:
    return sum(map(condition, served)) / max(1, len(served))
