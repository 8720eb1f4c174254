"""Budgets: the limits of tenants as leaky buckets, which the store keeps on its own clock.

What is used of a budget leaks away at a steady rate, so nothing resets on the minute (J. Turner, "New directions in
communications", 1986). What a request is expected to use is drawn by the script that places it: from all of its budgets
or from none, and only where it fits, so a limit is exact over any number of replicas. At its end it gives back what it
did not use: the rest of an estimate, and everything where no instance answered it, or its replica died. An answer that
was longer than expected leaves the budget overdrawn, until that has leaked away.

What is drawn in a time T, less what is given back in it, is at most the capacity and what leaks in T. A request gives
back what it did not use in full, also where some of it has leaked meanwhile. So what is used keeps to the rate on
average since the oldest request in flight was admitted; in a short time, after requests that ran for long and gave much
back, it can be more than the capacity, by as much as leaked while they ran.

A budget that does not leak bounds what is in flight: all of a draw is given back at the end. A quota counts in one day
or month of the store's clock; the first draw of the next one starts from zero, so nothing has to tidy up.

The store keeps what is used, not what is left, so a limit that is changed is in force with the next request.

Everything here is a function of values: the store only adds, subtracts and compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from itertools import chain
from math import ceil, floor
from operator import itemgetter, sub
from struct import Struct, pack, unpack
from typing import Any, Final
from urllib.parse import quote

import orjson

from dualmap.scheduling.tenants.allotments import ROUND_S, Division
from dualmap.scheduling.values import value

MINUTE_S: Final = 60.0


class Measure(StrEnum):
    """The measure of a limit."""

    REQUESTS = "requests"
    PROMPT_TOKENS = "prompt_tokens"
    OUTPUT_TOKENS = "output_tokens"
    TOKENS = "tokens"
    """Tokens of prompt and answer."""


class Period(StrEnum):
    """The time that the amount of a limit is for."""

    MINUTE = "minute"
    DAY = "day"
    """A quota, until midnight UTC."""
    MONTH = "month"
    IN_FLIGHT = "in_flight"
    """A number at a time, with no period."""


OF_MODEL: Final = "model:"
_QUOTAS: Final = (Period.DAY, Period.MONTH)
_IN_FLIGHT: Final = Period.IN_FLIGHT

KINDS: Final = tuple([f"{measure.value}/{period.value}" for measure in Measure for period in Period])
"""Kinds of limits by their numbers, which the store keeps: none may get another."""
DIVIDED: Final = 64
"""The number of a kind has this added in draws from a budget that is divided."""


@value
class Limit:
    """One limit of a tenant, of one of its keys, of a model that it uses, or of its calls about adapters."""

    measure: Measure
    period: Period
    amount: int
    """At least 1."""
    of: str = ""
    """The subject beside the tenant: ``key:NAME``, ``model:NAME`` or ``adapters``; empty: all that the tenant sends."""

    @property
    def leak_per_s(self) -> float:
        """The amount of what is used that is forgotten each second."""
        return self.amount / MINUTE_S if self.period is Period.MINUTE else 0.0


@value
class Budget:
    """A limit of a tenant, with the figures that are the same for all requests that draw from it."""

    name: str
    """The name of the budget, without blanks, quotes and backslashes (``budget_of``)."""
    limit: Limit
    division: Division | None = None
    """The division among pools; None: all of the budget is this pool's."""

    @property
    def capacity(self) -> int:
        return self.limit.amount

    @property
    def entry(self) -> tuple[str, int]:
        """The book that has it, and the number of its kind there."""
        return entry_of(self.name)


@value
class Draw:
    """The amount that a request takes of one budget."""

    budget: Budget
    cost: int

    @property
    def never_fits(self) -> bool:
        """Whether the request takes more than the budget ever holds."""
        return self.cost > self.budget.capacity


class BudgetGroup:
    """Budgets that requests draw from together, with all that is the same for these requests: each of them only fills
    in what it takes."""

    def __init__(self, budgets: Iterable[Budget]) -> None:
        """There is at least one. They are put in the order of their books."""
        by_book: dict[str, list[Budget]] = {}
        for budget in budgets:
            by_book.setdefault(budget.entry[0], []).append(budget)
        self.budgets: Final = tuple(chain.from_iterable(by_book.values()))
        self.names: Final = tuple([each.name for each in self.budgets])
        self.is_divided: Final = any(each.division is not None for each in self.budgets)
        self.counts_tokens: Final = any(each.limit.measure is not Measure.REQUESTS for each in self.budgets)
        figures = [_FIGURES.index(each.limit.measure) for each in self.budgets]
        in_flight = [each.limit.period is _IN_FLIGHT for each in self.budgets]
        self._cost_of: Final = _picked(figures)
        self.kept_of: Final = _picked([_NOTHING if each else figures[i] for i, each in enumerate(in_flight)])
        """Picks what is kept of a draw from each budget out of one request, its tokens of prompt, answer and both, and
        nothing."""
        texts = [each.name.replace("%", "%%") for each in self.budgets]
        self.text: Final = " ".join([f"{text} %d" for text in texts])
        """The text of draws (``drawn_text``), to be filled with costs."""
        divided = [
            (each.name, each.division.first_part(each.capacity), ",".join(each.division.pools))
            for each in self.budgets
            if each.division is not None
        ]
        self.divisions: Final = orjson.dumps(divided)
        """For each budget that is divided, as JSON: its name, the part that a pool has where none is entered, and the
        pools."""
        self.capacities: Final = tuple([each.capacity for each in self.budgets])
        form = b""
        for book, each in by_book.items():
            name = book.encode()
            form += _plain(pack("<BH", len(each), len(name)) + name)
            for budget in each:
                kind = budget.entry[1]
                form += _plain(pack("<B", kind if budget.division is None else kind + DIVIDED))
                form += b"%b" + _plain(_DOUBLE(budget.capacity))
        self.form: Final = form
        """Draws as the scripts take them, to be filled with packed amounts: for each book their number and its name;
        then for each the number of its kind, its amount, and that of the limit."""

    def draws(self, prompt_tokens: int, output_tokens: int, *, are_most: bool = False) -> Draws:
        """The draws of a request; the tokens of the answer are the expected ones, or the most that it may have."""
        return Draws(self, self._cost_of((1, prompt_tokens, output_tokens, prompt_tokens + output_tokens)), are_most)


_DOUBLE: Final = Struct("<d").pack


def _plain(packed: bytes) -> bytes:
    """Bytes as a form has them."""
    return packed.replace(b"%", b"%%")


_FIGURES: Final = (*Measure,)
_NOTHING: Final = len(_FIGURES)
"""The place behind these figures, of what is in flight: nothing of it is kept at the end."""


def _picked(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that returns what a tuple has at these places."""
    if len(places) == 1:
        (place,) = places
        return lambda figures: (figures[place],)
    return itemgetter(*places)


@value
class Draws:
    """The amounts that one request takes of its budgets, or gives back to them."""

    group: BudgetGroup
    costs: tuple[int, ...]
    are_most: bool = False
    """They are the most that the request may use. They stand until its instance reports a usage: a count by others may
    be too low, as one event of a stream can have several tokens."""

    @classmethod
    def of(cls, *draws: Draw) -> Draws:
        """These draws together; there is at least one."""
        group = BudgetGroup([each.budget for each in draws])
        cost_of = {each.budget.name: each.cost for each in draws}
        return cls(group, tuple([cost_of[name] for name in group.names]))

    @property
    def packed(self) -> bytes:
        """The draws as the scripts take them."""
        return self.group.form % tuple(map(_DOUBLE, self.costs))

    @property
    def each(self) -> tuple[Draw, ...]:
        """One by one."""
        return tuple(map(Draw, self.group.budgets, self.costs))


@value
class Drawn:
    """The reply of the store to the draws of one placement."""

    left: tuple[int, ...] = ()
    """The amount that is left of each budget, in the order of the draws; below 0 it is overdrawn. For one that is
    divided it is the rest of this pool's part."""
    unmet: int | None = None
    """The place of the draw that kept the request out, the one that takes longest to fit; None: all were drawn."""
    wait_s: float = 0.0
    """Time until it would fit if no other request drew; 0 where that depends on what is in flight, or a quota is spent.
    Where the budget is divided, what other pools have left is there after a round of the leader, and so is what leaks
    in them."""
    parts: Mapping[int, int] = field(default_factory=dict)
    """The part that this pool has of each budget that is divided, by the place of its draw."""

    def unused_in_s(self, place: int, amount: int) -> float:
        """Time until nothing is used of a limit of so much a minute, or of this pool's part of it, if no other request
        drew. A part that is overdrawn grows to what is used."""
        part = self.parts.get(place, amount) if self.parts else amount
        used = part - self.left[place]
        if used <= 0:
            return 0.0
        return MINUTE_S if part < used and part != amount else used * MINUTE_S / part


@value
class DrawnReply:
    """The reply of the scripts to draws (``statestore/lua/shared/budgets.lua``, ``weigh_draws``), which is read when
    its figures are needed: for most requests they never are."""

    draws: Draws
    found: bytes
    is_limited: bool
    """Not all of them fit."""

    def read(self) -> Drawn:
        draws, group, found = self.draws, self.draws.group, self.found
        capacities, figures = group.capacities, unpack(f"<{len(found) // 8}d", found)
        number, parts, elsewhere = len(capacities), dict[int, int](), dict[int, int]()
        if group.is_divided:
            divided = [place for place, each in enumerate(group.budgets) if each.division is not None]
            parts = dict(zip(divided, map(int, figures[number::2]), strict=True))
            elsewhere = dict(zip(divided, map(int, figures[number + 1 :: 2]), strict=True))
        rest = figures[:number]
        left = tuple(map(floor, rest))
        if not self.is_limited:
            return Drawn(left, parts=parts)
        lacks = [
            Lack(place, -each, parts.get(place, capacities[place]), elsewhere.get(place))
            for place, each in enumerate(rest)
            if each < 0
        ]
        return drawn_of(draws, left, lacks, parts)


@value
class Lack:
    """The shortage of a draw that does not fit its budget."""

    place: int
    """The place of the draw among those of its request."""
    beyond: float
    """The amount that it is too much."""
    part: int
    """The most that may be used in its pool: the capacity, or the pool's part of it."""
    elsewhere: int | None = None
    """The amount that is unused in other pools; None: the budget is not divided."""


def drawn_of(
    draws: Draws, left: tuple[int, ...], lacks: Iterable[Lack], parts: Mapping[int, int] | None = None
) -> Drawn:
    """The reply to draws of which some do not fit: of these it names a spent quota, else the first one of those that
    take longest to."""
    each = draws.each
    waits = [(_wait_s(each[lack.place], lack), lack.place) for lack in lacks]
    spent = [lack for lack in waits if lack[0] == 0 and each[lack[1]].budget.limit.period in _QUOTAS]
    wait_s, unmet = spent[0] if spent else max(waits, key=itemgetter(0))
    return Drawn(left, unmet, wait_s, parts or {})


def _wait_s(draw: Draw, lack: Lack) -> float:
    """Time until the draw would fit if no other request drew; 0 where that is not known: for what is in flight, and for
    a quota that is spent."""
    limit = draw.budget.limit
    if limit.period in _QUOTAS:
        return ROUND_S if lack.elsewhere is not None and lack.beyond <= lack.elsewhere else 0.0
    if limit.period is _IN_FLIGHT:
        return 0.0
    wait_s = lack.beyond / limit.leak_per_s
    if lack.elsewhere is not None:
        moved_s = ROUND_S + max(0.0, lack.beyond - lack.elsewhere) / limit.leak_per_s
        wait_s = moved_s if draw.cost > lack.part else min(moved_s, wait_s * limit.amount / max(1, lack.part))
    return ceil(wait_s * 1000) / 1000


def budgets_of(tenant: str, limits: Iterable[Limit], division: Division | None = None) -> tuple[Budget, ...]:
    """The budgets of a tenant's limits. ``division`` is that of the tenant, where it uses several pools; a model is of
    one pool."""
    return tuple(
        Budget(
            budget_of(tenant, limit),
            limit,
            None if division is None or limit.of.startswith(OF_MODEL) else division,
        )
        for limit in limits
    )


def group_of(budgets: Iterable[Budget], names: Collection[str]) -> BudgetGroup | None:
    """The budgets that a request for these names draws from (``key:NAME``, ``model:NAME``), beside those for all that
    its tenant sends; None: it draws from none."""
    drawn = [each for each in budgets if not each.limit.of or each.limit.of in names]
    return BudgetGroup(drawn) if drawn else None


def budget_of(tenant: str, limit: Limit) -> str:
    """The name of the budget of a limit. Its last word is the period: the store knows which day or month it is."""
    of = [_NO_PART_OF_A_NAME.sub(_escaped, limit.of)] if limit.of else []
    return "/".join([tenant, *of, limit.measure.value, limit.period.value])


_NO_PART_OF_A_NAME: Final = re.compile(r"[\s\x00-\x1f\x7f\"%\\]")
"""Characters of models' names that are escaped in names of budgets: the record of a request has these as one text in
JSON, between blanks."""


def _escaped(found: re.Match[str]) -> str:
    return quote(found[0], safe="")


def entry_of(name: str) -> tuple[str, int]:
    """The book that has the budget of this name, and the number of its kind there: a book is of a tenant, of one of its
    keys, of a model that it uses, or of its calls about adapters."""
    book, measure, period = name.rsplit("/", 2)
    return book, KINDS.index(f"{measure}/{period}")


def returned(draws: Draws, prompt_tokens: int | None, output_tokens: int | None, *, answered: bool) -> Draws:
    """The amounts that a request gives back when it is over. An amount below 0 is drawn beside what was expected.

    Everything is given back of a request that no instance answered, and of what bounds what is in flight. Where the
    instance reported no tokens, what was expected stays.
    """
    group, costs = draws.group, draws.costs
    if not answered:
        return Draws(group, costs)
    if prompt_tokens is not None and output_tokens is not None:
        return rest_of(draws, prompt_tokens, output_tokens)
    known = group.kept_of((None, prompt_tokens, output_tokens, None, 0))
    return Draws(group, tuple([0 if used is None else cost - used for cost, used in zip(costs, known, strict=True)]))


def rest_of(draws: Draws, prompt_tokens: int, output_tokens: int) -> Draws:
    """The amounts that an answered request gives back that used these tokens."""
    kept = draws.group.kept_of((1, prompt_tokens, output_tokens, prompt_tokens + output_tokens, 0))
    return Draws(draws.group, tuple(map(sub, draws.costs, kept)))


def nothing_of(draws: Draws) -> Draws:
    """Draws of nothing from the same budgets."""
    return Draws(draws.group, (0,) * len(draws.costs))


def drawn_text(draws: Draws) -> str:
    """The draws as a request's record has them: each budget and its cost, separated by blanks."""
    return draws.group.text % draws.costs
