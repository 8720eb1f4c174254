"""Whether a new revision is as good as the one before, judged while figures come in, as often as one likes.

Looking again and again at a test made for one look finds differences that are not there. Two tests are used that hold
at all times at once:

- *Times*: the ratio of geometric means, by the mixture sequential probability ratio test for a normal difference
  (Johari, Koomen, Pekelis, Walsh: "Peeking at A/B Tests", KDD 2017; "Always Valid Inference", Operations Research
  70(3), 2022). Inverted, it is a confidence sequence: with variance ``V`` of the difference and mixing scale ``t``, the
  truth leaves ``d ± sqrt(V (V + t²) / t² · (2 ln(1/α) + ln((V + t²)/V)))`` at any time with probability ``α`` at most.
- *Events* (errors, late first tokens, slow answers, other answers): each one is of the new revision with a probability
  that follows from the numbers of requests, if their rates are equal. The likelihood ratio of higher rates, mixed over
  several, is a martingale then, and passes ``1/α`` with probability ``α`` at most (Ville; Wald's SPRT with Robbins'
  mixture).

A figure is worse only where the evidence says so **and** the estimate is beyond the bound that the operator allows:
equal revisions would have to be unlucky in two ways. It is within the bound once its upper limit is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, field
from enum import StrEnum
from math import exp, inf, isfinite, log, sqrt
from typing import Final

from dualmap.scheduling.revisions.figures import Figures, Moments
from dualmap.scheduling.values import value

ALPHA: Final = 0.001
"""Probability that equal revisions are ever told apart by one figure in one step."""
ALPHA_PASSED: Final = 0.05
"""Probability that a step is passed by one figure that is worse than allowed: the next step looks again."""
RATIO_SCALE: Final = 0.3
"""Mixing scale of logarithms of ratios: differences of about a third are found soonest."""
SHARE_SCALE: Final = 0.02
RESEMBLANCE: Final = 2.0
"""Variances of times count so many times: requests of one session resemble each other, so they show less than as many
others."""
LEAST_TIMES: Final = 30
"""Times of each side before they are compared: their mean is nearly normal then."""
LEAST_REQUESTS: Final = 50
"""Requests of the new revision before a step may be passed."""
HIGHER_RATES: Final = (1.5, 2.0, 4.0, 8.0, 16.0, 64.0)


class Standing(StrEnum):
    """What the figures say of the new revision."""

    OPEN = "open"
    """There is not enough evidence yet."""
    WITHIN = "equal"
    """It is worse by more than is allowed with hardly any probability."""
    BETTER = "better"
    WORSE = "worse"


@value
class Bounds:
    """How much worse a new revision may be. Ratios for times, differences of shares for events."""

    ttft: float = 1.25
    tpot: float = 1.25
    errors: float = 0.01
    late: float = 0.05
    slow: float = 0.05
    differs: float = 0.05
    _: KW_ONLY
    own: Mapping[str, float] = field(default_factory=dict)
    """Shares of bad events of the operator's own, by name."""

    @classmethod
    def of(cls, given: Mapping[str, float]) -> Bounds:
        """Bounds by name; others are the operator's own. Raises ValueError where one is impossible."""
        known = {name: each for name, each in given.items() if name in BOUNDED}
        for name, each in given.items():
            if not (1.0 < each <= 100.0 if name in _RATIOS else 0.0 < each <= 1.0):
                wanted = "a ratio above 1, as 1.25" if name in _RATIOS else "a share between 0 and 1, as 0.01"
                raise ValueError(f"the bound {name} must be {wanted}")
        return cls(**known, own={name: each for name, each in given.items() if name not in BOUNDED})

    @property
    def by_name(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in BOUNDED} | dict(self.own)


BOUNDED: Final = ("ttft", "tpot", "errors", "late", "slow", "differs")
_RATIOS: Final = frozenset({"ttft", "tpot"})


@value
class Events:
    """How many of so many went wrong."""

    of: int = 0
    bad: int = 0

    @property
    def share(self) -> float:
        return self.bad / self.of if self.of else 0.0


@value
class Judgement:
    """One figure of a new revision beside that of the others."""

    name: str
    standing: Standing
    estimate: float
    """A ratio for times, a difference of shares for events."""
    high: float
    """The upper limit of what it may be in truth; infinite: there are too few to compare."""
    bound: float

    @property
    def text(self) -> str:
        if not isfinite(self.high):
            return f"{self.name} too few to compare"
        if self.name in _RATIOS:
            return f"{self.name} × {self.estimate:.3g} (at most × {self.high:.3g}, allowed × {self.bound:.3g})"
        points = f"{self.name} {100 * self.estimate:+.2g} points"
        return f"{points} (at most {100 * self.high:+.2g}, allowed {100 * self.bound:+.2g})"


OwnEvents = Mapping[str, tuple[Events, Events]]
"""Events that operators report, by name: of the revisions before, and of the new one."""
_NO_OWN: Final[OwnEvents] = {}


def judge(before: Figures, new: Figures, bounds: Bounds, own: OwnEvents = _NO_OWN) -> tuple[Judgement, ...]:
    """The figures of a new revision beside those of the others, over the same time."""
    found = [
        _times("ttft", before.ttft, new.ttft, bounds.ttft),
        _times("tpot", before.tpot, new.tpot, bounds.tpot),
        *(_events(name, each(before), each(new), getattr(bounds, name)) for name, each in _EVENTS),
    ]
    for name, bound in bounds.own.items():
        own_before, own_new = own.get(name, (Events(), Events()))
        found.append(_events(name, own_before, own_new, bound))
    return tuple(found)


_EVENTS: Final[tuple[tuple[str, Callable[[Figures], Events]], ...]] = (
    ("errors", lambda each: Events(each.requests, each.failed)),
    ("late", lambda each: Events(each.judged, each.late)),
    ("slow", lambda each: Events(each.streamed, each.slow)),
    ("differs", lambda each: Events(each.compared, each.differing)),
)


def overall(judgements: tuple[Judgement, ...], new: Figures) -> Standing:
    """What all figures say together: worse where one is; open while one is, unless nothing of its kind ever came."""
    standings = {each.standing for each in judgements}
    if Standing.WORSE in standings:
        return Standing.WORSE
    if Standing.OPEN in standings or new.requests < LEAST_REQUESTS:
        return Standing.OPEN
    return Standing.BETTER if Standing.BETTER in standings else Standing.WITHIN


def half_width(variance: float, scale: float, alpha: float = ALPHA) -> float:
    """Half of the confidence sequence's width for a difference of this variance."""
    if variance <= 0.0:
        return 0.0
    mixed = scale * scale
    return sqrt(variance * (variance + mixed) / mixed * (2 * log(1 / alpha) + log((variance + mixed) / variance)))


def event_evidence(before: Events, new: Events) -> float:
    """The likelihood of what was seen where the new revision's rate is higher, over that where the rates are equal."""
    if not (before.of and new.of):
        return 1.0
    part = new.of / (before.of + new.of)
    logs = []
    for ratio in HIGHER_RATES:
        higher = ratio * part / (ratio * part + 1 - part)
        logs.append(new.bad * log(higher / part) + before.bad * log((1 - higher) / (1 - part)))
    return exp(min(700.0, max(logs))) * sum(exp(each - max(logs)) for each in logs) / len(logs)


def _times(name: str, before: Moments, new: Moments, bound: float) -> Judgement:
    if not before.count and not new.count:  # nothing of the kind is served here
        return Judgement(name, Standing.WITHIN, 1.0, 1.0, bound)
    if before.count < LEAST_TIMES or new.count < LEAST_TIMES:
        return Judgement(name, Standing.OPEN, 1.0, inf, bound)
    difference = new.mean - before.mean
    variance = RESEMBLANCE * (before.variance / before.count + new.variance / new.count)
    half = half_width(variance, RATIO_SCALE)
    is_worse = difference - half > 0 and difference > log(bound)
    high = difference + half_width(variance, RATIO_SCALE, ALPHA_PASSED)
    standing = _standing(is_worse, high, log(bound))
    return Judgement(name, standing, exp(difference), exp(min(700.0, high)), bound)


def _events(name: str, before: Events, new: Events, bound: float) -> Judgement:
    if not before.of and not new.of:
        return Judgement(name, Standing.WITHIN, 0.0, 0.0, bound)
    if not before.of or not new.of:
        return Judgement(name, Standing.OPEN, 0.0, inf, bound)
    difference = new.share - before.share
    variance = _variance(before) + _variance(new)
    high = difference + half_width(variance, SHARE_SCALE, ALPHA_PASSED)
    is_worse = event_evidence(before, new) >= 1 / ALPHA and difference > bound
    return Judgement(name, _standing(is_worse, high, bound), difference, min(1.0, high), bound)


def _variance(events: Events) -> float:
    """Of a share, as it would be with one more event of each kind: none seen does not mean that none comes."""
    share = (events.bad + 1) / (events.of + 2)
    return share * (1 - share) / events.of


def _standing(is_worse: bool, high: float, bound: float) -> Standing:
    if is_worse:
        return Standing.WORSE
    if high < 0:
        return Standing.BETTER
    return Standing.WITHIN if high < bound else Standing.OPEN
