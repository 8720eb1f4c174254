"""Metering: what each request of a tenant used, counted once.

A request is metered by the script that ends it, in the step that removes its record: a repetition finds no record, and
so counts nothing. What becomes of its tries does not matter, as only its end says what it used: the release of a try
keeps the record (``KEPT``), on no instance, until the next try takes it over or the request ends without one. A
request whose replica died is metered by the process that ends it then, with what its record says, as ``LOST``. Where
the replica was not dead, and enters the request again, that is taken back (``TAKEN_BACK``).

The store adds up; what is counted is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Final

from dualmap.scheduling.request.charge import Charge
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.legs import request_id_of
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.values import value

LOST: Final = "lost"
"""The outcome of a request whose replica died, or forgot it: how it ended is not known."""
KEPT: Final = "kept"
"""A release has this in the place of the usage where the try is over, and the request is not: nothing is left of the
try but a record on no instance."""
TAKEN_BACK: Final = "taken_back"
"""The outcome of a record that undoes one with outcome ``LOST``: its counts are the negative ones, as the replica was
not dead, and the request goes on. So sums over records and over days agree, and each request counts once."""
NO_CLASS: Final = "-"
REPORTED: Final = "reported"
EXPECTED: Final = "expected"


@value
class Account:
    """A tenant's key, class and model, for which requests are counted. In texts these names are separated by blanks, of
    which only the last has any."""

    tenant: str
    key: str
    priority_class: str
    """Empty: none."""
    model: str
    """The name that instances are asked for, so that clients cannot make up accounts."""

    def __str__(self) -> str:
        return f"{self.tenant} {self.key} {self.priority_class or NO_CLASS} {self.model}"

    @classmethod
    def parse(cls, text: str) -> Account:
        """Raises ValueError if the text is malformed."""
        tenant, key, priority_class, model = text.split(" ", 3)
        return cls(tenant, key, "" if priority_class == NO_CLASS else priority_class, model)


@lru_cache(maxsize=4096)
def account_text(tenant: str, key: str, priority_class: str, model: str) -> str:
    """The text of an account. Every request has one, and there are few of them."""
    return str(Account(tenant, key, priority_class, model))


@value
class Counts:
    """The sums over the requests of an account."""

    requests: int = 0
    """Requests that were admitted, and are over."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that were sent, and that no instance failed, cached ones among them."""
    cached_tokens: int = 0
    """Prompt tokens that instances reported to have found in their caches."""
    output_tokens: int = 0
    unanswered: int = 0
    """Requests that count no tokens: they were not sent, or an instance failed or refused them."""
    lost: int = 0
    """Requests whose replica died, or forgot them."""
    refused: int = 0
    """Requests that a limit of the tenant kept out; they are in none of the other counts."""

    def __str__(self) -> str:
        return " ".join([str(getattr(self, name)) for name in COUNTS])

    @classmethod
    def parse(cls, text: str) -> Counts:
        """Raises ValueError if the text is malformed."""
        figures = [int(word) for word in text.split()]
        if len(figures) != len(COUNTS):
            raise ValueError(f"no counts: {text!r}")
        return cls(*figures)

    def __add__(self, other: Counts) -> Counts:
        return Counts(*[getattr(self, name) + getattr(other, name) for name in COUNTS])

    def __neg__(self) -> Counts:
        return Counts(*[-getattr(self, name) for name in COUNTS])


COUNTS: Final = tuple(each.name for each in fields(Counts))


def used_by(outcome: Outcome, charged: Charge | None) -> str:
    """The usage of a request, as its release says it: its counts, its outcome, whether an instance reported the tokens.

    ``charged`` are the tokens that it is charged; None: it used nothing.
    """
    if charged is None:
        return f"1 0 0 0 1 0 0 {outcome} {REPORTED}"
    prompt, output = charged.prompt_tokens, charged.output_tokens
    if charged.reported:
        return _REPORTED_USE % (prompt, charged.cached_tokens, output, outcome)
    return f"1 {prompt} 0 {output} 0 0 0 {outcome} {EXPECTED}"


_REPORTED_USE: Final = f"1 %d %d %d 0 0 0 %s {REPORTED}"


def used_by_lost(request: StoredRequest, known: Collection[str]) -> str:
    """The usage of a request that its replica left behind: its prompt, if it is known to be computed, and nothing of an
    answer of unknown length. Empty where another record among the ``known`` ids meters it, or it has no account."""
    whole_id = request_id_of(request.request_id)
    if not request.account or (whole_id != request.request_id and whole_id in known):
        return ""
    prompt = request.prompt_tokens if request.state is RequestState.PREFILLED else 0
    return f"1 {prompt} 0 0 0 1 0 {LOST} {EXPECTED}"


@value
class UsageRecord:
    """One request that is over."""

    ended_ms: int
    """The time by the store's clock, since 1970."""
    request_id: str
    account: Account
    counts: Counts
    outcome: str
    """A value of ``Outcome``, or ``LOST``."""
    reported: bool
    """Whether an instance reported the tokens; else the router counted them, or they are expected ones."""

    @classmethod
    def parse(cls, text: str) -> UsageRecord:
        """Raises ValueError if the text is malformed."""
        words: Sequence[str] = text.split(" ", len(COUNTS) + 4)
        figures, (outcome, how, request_id, account) = words[1 : len(COUNTS) + 1], words[len(COUNTS) + 1 :]
        counts = Counts.parse(" ".join(figures))
        return cls(int(words[0]), request_id, Account.parse(account), counts, outcome, how == REPORTED)
