"""What the requests of a revision show, as sums that replicas add up and the gate judges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, fields, replace
from math import isfinite, log
from typing import Any, Final

from dualmap.scheduling.values import value

LEAST_S: Final = 1e-4
"""Shorter times count as this: their logarithm is taken."""


@value
class Moments:
    """Sums of a figure's logarithms: its geometric mean, and how much it varies."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, seconds: float) -> Moments:
        each = log(max(seconds, LEAST_S))
        return cls(1, each, each * each)

    def plus(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Of single values; 0 where there are fewer than two."""
        if self.count < 2:
            return 0.0
        return max(0.0, (self.squares - self.total * self.mean) / (self.count - 1))


@value
class Figures:
    """Sums over requests that have ended, of sessions that began since the last change of the weights: older sessions
    are not comparable, as a revision that grows has new ones alone."""

    requests: int = 0
    failed: int = 0
    """Requests that an instance of the revision failed, whether or not another one answered them then."""
    judged: int = 0
    """Requests of which it is known whether their first token was on time."""
    late: int = 0
    streamed: int = 0
    """Streamed answers whose time per token is known."""
    slow: int = 0
    """Streamed answers that took longer per token than ``split.slo_tpot_s``."""
    _: KW_ONLY
    ttft: Moments = Moments()
    """First tokens, seconds."""
    tpot: Moments = Moments()
    """Times per output token, seconds."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens that were found in caches."""
    output_tokens: int = 0
    compared: int = 0
    """Greedy answers whose tokens were compared with those of the request that they are a copy of."""
    differing: int = 0
    """Those that differ."""
    agreed_tokens: int = 0
    """Tokens before the first one that differs, of those."""

    def plus(self, other: Figures) -> Figures:
        return Figures(**{each: _sum(getattr(self, each), getattr(other, each)) for each in _NAMES})

    def since(self, before: Figures) -> Figures:
        """The growth since then; all of it where a process that began again counts less."""
        if self.requests < before.requests:
            return self
        return self.plus(Figures(**{each: _negative(getattr(before, each)) for each in _NAMES}))

    def since_warm(self, cold: Figures) -> Figures:
        """The figures without first tokens and hits, which depend on caches, of the requests that were seen until these
        were warm."""
        return replace(
            self,
            judged=self.judged - cold.judged,
            late=self.late - cold.late,
            ttft=self.ttft.plus(_negative(cold.ttft)),
            prompt_tokens=self.prompt_tokens - cold.prompt_tokens,
            hit_tokens=self.hit_tokens - cold.hit_tokens,
        )

    @property
    def of_differing(self) -> Figures:
        """The part that shows how answers differ."""
        return Figures(compared=self.compared, differing=self.differing, agreed_tokens=self.agreed_tokens)

    @property
    def text(self) -> str:
        """The sums as one word."""
        return ",".join(f"{each:.9g}" if isinstance(each, float) else str(each) for each in self._numbers())

    def _numbers(self) -> list[int | float]:
        numbers: list[int | float] = []
        for name in _NAMES:
            each = getattr(self, name)
            numbers += (each.count, each.total, each.squares) if isinstance(each, Moments) else (each,)
        return numbers

    @classmethod
    def parse(cls, text: str) -> Figures:
        """Raises ValueError where these are no such sums."""
        numbers = iter(text.split(","))
        try:
            found = cls(**{name: _read(name, numbers) for name in _NAMES})
        except StopIteration:
            raise ValueError(f"{text!r} are no figures") from None
        if next(numbers, None) is not None or not all(map(isfinite, found._numbers())):
            raise ValueError(f"{text!r} are no figures")
        return found


_NAMES: Final = tuple(each.name for each in fields(Figures))
_MOMENTS: Final = frozenset({"ttft", "tpot"})
NO_FIGURES: Final = Figures()


def _read(name: str, numbers: Any) -> Any:
    if name in _MOMENTS:
        return Moments(int(next(numbers)), float(next(numbers)), float(next(numbers)))
    return int(next(numbers))


def _sum(one: Any, other: Any) -> Any:
    return one.plus(other) if isinstance(one, Moments) else one + other


def _negative(each: Any) -> Any:
    return Moments(-each.count, -each.total, -each.squares) if isinstance(each, Moments) else -each


def figures_text(version: int, by_revision: Mapping[str, Figures]) -> str:
    """The figures of a process since the weights have this version, as a heartbeat carries them; "" for none."""
    words = [f"{name}={each.text}" for name, each in sorted(by_revision.items())]
    return " ".join([str(version), *words]) if words else ""


def figures_from(text: str, version: int) -> dict[str, Figures]:
    """The figures in such a text, if they are of this version; none where it cannot be read."""
    first, *words = text.split() or [""]
    if first != str(version):
        return {}
    try:
        return {name: Figures.parse(sums) for name, _, sums in (word.rpartition("=") for word in words)}
    except ValueError:
        return {}


def total(each: Iterable[Figures]) -> Figures:
    found = NO_FIGURES
    for one in each:
        found = found.plus(one)
    return found
