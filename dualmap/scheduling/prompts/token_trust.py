"""Trust in a method of counting a prompt's tokens: a state that engines' own counts give, and take away.

A model's files may not be those that its engines have, a library may build another tokenizer from them, and a request
may hold something that is rendered otherwise. The counts alone do not show it. So none is called exact before it was
compared:

- The tokenizer as a whole is compared on a few texts that tokenizers differ in, at the start and whenever miscounts are
  more than a few in a hundred.
- Each kind of request (``kind``: what it is made of) is compared by the tokens that engines report of its prompts.

A count is exact while both are ``EXACT``. One count that differs withdraws it from its kind.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Trust(StrEnum):
    UNVERIFIED = "unverified"
    """Nothing was compared yet: its counts are used, and are not called exact."""
    EXACT = "exact"
    MISTRUSTED = "mistrusted"
    """The counts of the tokenizer are not used."""


class TokenEvidence(StrEnum):
    AGREED = "agreed"
    DIFFERED = "differed"
    LAPSED = "lapsed"
    """Earlier evidence no longer counts."""


TRANSITIONS: Final = {
    (Trust.UNVERIFIED, TokenEvidence.AGREED): Trust.EXACT,
    (Trust.UNVERIFIED, TokenEvidence.DIFFERED): Trust.MISTRUSTED,
    (Trust.UNVERIFIED, TokenEvidence.LAPSED): Trust.UNVERIFIED,
    (Trust.EXACT, TokenEvidence.AGREED): Trust.EXACT,
    (Trust.EXACT, TokenEvidence.DIFFERED): Trust.MISTRUSTED,
    (Trust.EXACT, TokenEvidence.LAPSED): Trust.UNVERIFIED,
    # Requests that had been sent already prove nothing about a kind that miscounted.
    (Trust.MISTRUSTED, TokenEvidence.AGREED): Trust.MISTRUSTED,
    (Trust.MISTRUSTED, TokenEvidence.DIFFERED): Trust.MISTRUSTED,
    (Trust.MISTRUSTED, TokenEvidence.LAPSED): Trust.UNVERIFIED,
}

WINDOW_COUNTS: Final = 200
MAX_MISCOUNTED_SHARE: Final = 0.03
MIN_MISCOUNTED: Final = 3
"""Fewer than this are no share: one odd request of ten is a matter of its kind."""
AGREED_IN_ROW: Final = 20
"""Counts of engines that stand for a comparison of texts, where no instance tokenizes."""
AGREED_AGAIN: Final = 8
"""Counts in a row after which a kind that was mistrusted is exact again."""
MISTRUSTED_S: Final = 600.0
"""Time after which mistrusted counts are tried again; for a kind it doubles each time that they differ."""
MAX_MISTRUSTED_S: Final = 86_400.0
MAX_KINDS: Final = 512


@dataclass(slots=True)
class _Kind:
    trust: Trust = Trust.UNVERIFIED
    agreed_in_row: int = 0
    needed: int = 1
    mistrusted_s: float = MISTRUSTED_S
    until_s: float = 0.0


class TokenTrust:
    """The trust in one method of counting, for one model's prompts."""

    def __init__(self, whole: Trust = Trust.UNVERIFIED) -> None:
        self.whole = whole
        self._whole_until_s = 0.0
        self._agreed_in_row = 0
        self._window: deque[bool] = deque(maxlen=WINDOW_COUNTS)
        self._miscounted = 0
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def of(self, kind: Hashable, now_s: float) -> Trust:
        """The state of counts of such requests."""
        if self.whole is Trust.MISTRUSTED:
            return Trust.MISTRUSTED
        known = self._kinds.get(kind)
        if known is None:
            return Trust.UNVERIFIED
        self._lapse(known, now_s)
        return self.whole if known.trust is Trust.EXACT else known.trust

    def compared(self, *, agreed: bool, now_s: float) -> None:
        """Texts were compared."""
        evidence = TokenEvidence.AGREED if agreed else TokenEvidence.DIFFERED
        self.whole = TRANSITIONS[TRANSITIONS[self.whole, TokenEvidence.LAPSED], evidence]
        self._whole_until_s = now_s + MISTRUSTED_S
        self._forget_window()

    def counted(self, kind: Hashable, *, agreed: bool, now_s: float) -> bool:
        """An engine has counted such a prompt; True if its kind is mistrusted from now on."""
        self._note(agreed=agreed)
        return self.judge(kind, agreed=agreed, now_s=now_s)

    def judge(self, kind: Hashable, *, agreed: bool, now_s: float) -> bool:
        """Judge one count for its kind alone; result as in ``counted``."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _Kind()
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        if agreed:
            known.agreed_in_row += 1
            if known.agreed_in_row >= known.needed:
                known.trust = TRANSITIONS[known.trust, TokenEvidence.AGREED]
            return False
        was = known.trust
        known.trust, known.agreed_in_row, known.needed = TRANSITIONS[was, TokenEvidence.DIFFERED], 0, AGREED_AGAIN
        if was is Trust.MISTRUSTED:
            return False
        known.until_s = now_s + known.mistrusted_s
        known.mistrusted_s = min(MAX_MISTRUSTED_S, 2 * known.mistrusted_s)
        return True

    def is_comparison_due(self, now_s: float) -> bool:
        """Whether texts should be compared now."""
        if self.whole is Trust.MISTRUSTED:
            return now_s >= self._whole_until_s
        return self.whole is Trust.UNVERIFIED

    def mistrusted_kinds(self, now_s: float) -> int:
        for known in self._kinds.values():
            self._lapse(known, now_s)
        return sum(known.trust is Trust.MISTRUSTED for known in self._kinds.values())

    def _note(self, *, agreed: bool) -> None:
        """Add one count to the judgement of all kinds together."""
        if len(self._window) == WINDOW_COUNTS and not self._window[0]:
            self._miscounted -= 1
        self._window.append(agreed)
        self._agreed_in_row = self._agreed_in_row + 1 if agreed else 0
        self._miscounted += not agreed
        if self._miscounted >= max(MIN_MISCOUNTED, MAX_MISCOUNTED_SHARE * len(self._window)):
            self.whole = self.whole if self.whole is Trust.MISTRUSTED else TRANSITIONS[self.whole, TokenEvidence.LAPSED]
            self._forget_window()
        elif self._agreed_in_row >= AGREED_IN_ROW:
            self.whole = TRANSITIONS[self.whole, TokenEvidence.AGREED]

    def _forget_window(self) -> None:
        self._window.clear()
        self._miscounted = self._agreed_in_row = 0

    def _lapse(self, known: _Kind, now_s: float) -> None:
        if known.trust is Trust.MISTRUSTED and now_s >= known.until_s:
            known.trust = TRANSITIONS[known.trust, TokenEvidence.LAPSED]
