"""How long an answer will be, learned from the answers of the pool by the limits that requests set.

The context of running requests is counted with the answer that is expected of them. A request's limit (``max_tokens``)
says what an answer cannot exceed, not how long it is: requests with similar limits are of one kind, and their mean is
learned. A mean, not a quantile, since it is sums of many answers that fill KV memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

CLASS_LIMITS = (64, 256, 1024, 4096)
"""The largest limit of each class but the last two: greater ones, and none."""
CLASSES = len(CLASS_LIMITS) + 2
PRIOR_TOKENS = 256
"""Assumed length of an answer before the pool has shown any."""
PRIOR_ANSWERS = 16
"""Answers that the prior counts for."""
MEMORY_ANSWERS = 2048
"""Sums are halved above this, so that former traffic fades."""

PRIOR_MEANS = tuple([float(min(PRIOR_TOKENS, limit)) for limit in CLASS_LIMITS] + [float(PRIOR_TOKENS)] * 2)


def class_of(limit: int | None) -> int:
    """The class of requests with this limit; None and 0: without one."""
    return CLASSES - 1 if not limit else bisect_left(CLASS_LIMITS, limit)


def expected_answer_tokens(means: Sequence[float], limit: int | None) -> int:
    """Assumed length of the answer to a request with this limit; None and 0: without one. At least 1, and never above
    the limit."""
    mean = means[class_of(limit)]
    return round(limit if limit and limit < mean else mean) or 1


@dataclass(slots=True)
class AnswerLengths:
    """Sums by class. The prior counts as ``PRIOR_ANSWERS`` answers and is never forgotten."""

    _tokens: list[float] = field(default_factory=lambda: [0.0] * CLASSES)
    _answers: list[float] = field(default_factory=lambda: [0.0] * CLASSES)

    def add(self, limit: int | None, tokens: int) -> None:
        kind = class_of(limit)
        self._tokens[kind] += tokens
        self._answers[kind] += 1
        if self._answers[kind] > MEMORY_ANSWERS:
            self._tokens[kind] /= 2
            self._answers[kind] /= 2

    @property
    def means(self) -> tuple[float, ...]:
        """The expected length by class, in tokens."""
        return tuple([self._mean(kind) for kind in range(CLASSES)])

    def _mean(self, kind: int) -> float:
        prior = PRIOR_MEANS[kind] * PRIOR_ANSWERS
        return round((self._tokens[kind] + prior) / (self._answers[kind] + PRIOR_ANSWERS), 1)
