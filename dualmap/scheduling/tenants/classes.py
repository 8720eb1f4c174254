"""Priority classes: which requests go first, whosever they are.

Classes are listed from the highest to the lowest one. What is of a higher class goes first, late or on time, and what
does not fit is passed over in the lowest class first. A class is the outer part of a request's band, its level among
tenants (``scheduling.tenants.shares``) the inner one. Two rules keep a class from taking all or nothing:

- A class may have a *floor*, a part of the fleet's prefill. The leader dispatches waiting requests of it, the oldest
  first, at that rate (``scheduling.queues.floors``). So it makes progress whatever others send.
- A class that *fills idle room* is dispatched where nothing else wants to be prefilled and memory is left, and waits
  otherwise, deferred from the start. No request of another class waits for it, and it is not late.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualmap.scheduling.settings import PriorityClassSettings
from dualmap.scheduling.tenants.shares import LEVELS

USUAL_CLASS = "default"
"""The class of requests that name none, where a class is called so; else it is the first."""


def class_band(rank: int) -> int:
    """The lowest band of a class."""
    return rank * LEVELS


def class_name(classes: Sequence[PriorityClassSettings], rank: int) -> str:
    """The name of the class of this place, or the lowest one where there are fewer by now; empty where there are
    none."""
    return classes[min(rank, len(classes) - 1)].name if classes else ""


def rank_of_name(classes: Sequence[PriorityClassSettings], name: str) -> int:
    """The place of the class of this name; of the usual one where there is no such class; 0 where there is none."""
    return class_rank(classes, name or None) if classes else 0


def rank_of_band(band: int) -> int:
    """The place of the class that a band belongs to."""
    return band // LEVELS


def is_above(band: int, other: int) -> bool:
    """Whether one band is of a higher class than another."""
    return rank_of_band(band) < rank_of_band(other)


def class_rank(
    classes: Sequence[PriorityClassSettings],
    named: str | None = None,
    service_tier: str | None = None,
    priority: int | None = None,
    highest: str | None = None,
) -> int:
    """The place of a request's class among these, of which there must be one.

    ``named`` is the class that it asks for, ``service_tier`` and ``priority`` are what its body has (OpenAI's field,
    and vLLM's, where lower goes first). What is unknown counts as not said. ``highest`` is the class of its tenant,
    which it has unless it asks for a lower one; "" of a tenant without a class, for which it is the usual one. None: it
    has no tenant, and may ask for any.
    """
    names: list[str | None] = [each.name for each in classes]
    usual = names.index(USUAL_CLASS) if USUAL_CLASS in names else 0
    cap = 0 if highest is None else names.index(highest) if highest in names else usual
    rank_of_request = usual if highest is None or highest not in names else cap
    tiered = [rank for rank, each in enumerate(classes) if service_tier in each.service_tiers]
    if named in names:
        rank_of_request = names.index(named)
    elif tiered:
        rank_of_request = tiered[0]
    elif priority is not None:
        rank_of_request = max(
            (rank for rank, each in enumerate(classes) if each.engine_priority <= priority), default=0
        )
    return max(rank_of_request, cap)
