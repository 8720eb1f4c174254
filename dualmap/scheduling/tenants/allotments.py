"""Allotments: how a limit is divided among the pools of a tenant.

A pool keeps its own books, and may be on another shard than others. A budget of a tenant that uses several pools is
therefore divided: each pool is *allotted* a part of the limit, which it admits requests by alone, and the parts are
never more than the limit together. What leaks a second is divided likewise. As every draw fits into its pool's part,
what is used in all pools is at most the limit at any time, and what leaks in all of them is at most what the limit
leaks: the limit holds over the pools as it does in one.

Unused budget moves to where it is wanted. A pool *wants* more of a budget once a request did not fit, or more than
``WANTED_FROM`` of its part is used. The leader then divides again what is unused in all pools: first what refused
requests need, the smallest first; of the rest, pools that want it get all but ``1 / KEPT``, and the others that. So a
pool that wants all can get all but that part of what others leave unused, after one round of the leader, and what a
part lacks for a request is there after one round if it is unused anywhere. What is used in a pool is never taken from
it.

A part is entered in a ledger before its pool is told of it, and leaves the ledger after its pool gave it up, so the
ledger has at least what any pool may admit, and never more than the limit together. Each change has a *stamp*, a number
above all before it, and a pool refuses a change whose stamp is not above that of its last one: a leader that was
overtaken gives nothing that a later one has taken.

Everything here is a function of values; the leader's job drives it (``workers.allotter``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dualmap.scheduling.values import value

WANTED_FROM: Final = 0.75
"""The share of its part that a pool uses before it wants more."""
KEPT: Final = 8
"""The share of unused budget, one in so many, that is left to pools that do not want it."""
ROUND_S: Final = 1.0
"""Pause between two rounds of a leader."""


@value
class Division:
    """The division of a tenant's budgets that one of its pools assumes until the leader has divided them."""

    pools: tuple[str, ...]
    """The names of the budgets, in order."""
    place: int
    """The place of this one among them."""
    begins: bool
    """Whether it has an equal part where none is entered; else it has nothing then."""

    def first_part(self, amount: int) -> int:
        """The part of this pool where the store has none."""
        return equal_part(amount, self.place, len(self.pools)) if self.begins else 0


def equal_part(amount: int, place: int, pools: int) -> int:
    """The part of the pool at ``place`` among ``pools``. All parts together are the amount."""
    return amount // pools + (place < amount % pools)


def in_force(part: int, of: int, amount: int) -> int:
    """A part that was allotted of one amount, after the limit has become another one."""
    return part if of == amount else part * amount // of


def divided(amount: int, used: Mapping[str, int], wanted: Mapping[str, int], pools: Collection[str]) -> dict[str, int]:
    """The part of each pool that ``used`` names; together they are at most ``amount``.

    ``wanted`` are the pools that want more, each with the cost of a request that did not fit; 0: none was refused.
    Pools that are not among ``pools``, as the tenant uses them no more, keep what is used there.
    """
    amount = max(0, amount)
    total = sum(used.values())
    rest = amount - total
    if rest < 0:
        return {pool: amount * each // total for pool, each in used.items()}
    parts = dict(used)
    members = sorted(pool for pool in used if pool in pools)
    wanting = sorted((pool for pool in members if pool in wanted), key=wanted.__getitem__)
    others = [pool for pool in members if pool not in wanted]
    for pool in wanting:
        if wanted[pool] <= rest:
            parts[pool] += wanted[pool]
            rest -= wanted[pool]
    kept = rest // KEPT if wanting and others else 0 if wanting else rest
    _spread(parts, wanting, rest - kept)
    _spread(parts, others, kept)
    return parts


def within(amount: int, parts: Mapping[str, int], has: Mapping[str, int]) -> dict[str, int]:
    """The parts, each at least what its pool ``has``, and together at most ``amount`` if that leaves room for what the
    pools have.

    They are more than the amount together where a pool used more meanwhile than it was to keep. Then the parts that
    were to grow the most grow less.
    """
    found = {pool: max(part, has[pool]) for pool, part in parts.items()}
    beyond = sum(found.values()) - amount
    for pool in sorted(found, key=lambda each: has[each] - found[each]):
        less = max(0, min(beyond, found[pool] - has[pool]))
        found[pool] -= less
        beyond -= less
    return found


def _spread(parts: dict[str, int], pools: Sequence[str], amount: int) -> None:
    for place, pool in enumerate(pools):
        parts[pool] += equal_part(amount, place, len(pools))
