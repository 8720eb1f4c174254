"""Fair shares: who is passed over when not everything fits.

A tenant's *share* is its weight's part of the fleet's work among the tenants that are active now. Work is counted in
seconds of one instance: the prefill of uncached tokens at the instance's rate, and the part of its KV memory that a
context takes, for as long as it does. Requests are no measure: one may cost a thousand times what another does.

The store keeps two books of each tenant: the work that it *sent*, a sum that decays with ``SENT_WINDOW_S``, and the
work that instances were *given* of it, which decays with ``GIVEN_WINDOW_S``. Prefill is entered when it is sent and
when it is dispatched. Memory is entered in both while a context holds it: the contexts of long answers pile up over
minutes, and entered at their ends they would be free until then. A placement is judged by where its tenant stands then,
its *level*:

- 0: what it sent lately is within its share of what the fleet can do;
- 1: it sent more, but it was given less than ``LEVELS_FROM`` of its share of what all were given lately;
- from 2 on: it was given more. Each level is a factor of ``LEVEL_STEP``.

A plan passes over the highest level first, and the longest within a level (``scheduling.queues.queue_order``). So a
tenant within its share pays for no other's burst, tenants beyond theirs come out level by work, and among equals the
deadlines decide as without tenants. No tenant's work is kept back while there is room: the books matter only where a
queue cannot be on time as a whole.

What was sent decides first, as it has no memory to speak of. By what was given alone, a tenant that was quiet for a
minute would pass over a steady one within its share until it has caught up. What was given is remembered for longer: in
the first seconds of an overload all tenants are within their shares by what they sent, so the longest requests are
passed over, and their tenant makes up for it later.

To have been quiet is no credit: a tenant above its share counts as if it had been given as much, by weight, as the last
one above its share before it, less its share of ``SENT_WINDOW_S``. This is the rule of start-time fair queueing (P.
Goyal, H. Vin, H. Cheng, 1996), by which who returns starts at the virtual time of who is served. Else a tenant that
took what others left would get nothing until one that comes back has caught up with it.

A tenant is *active* for ``ACTIVE_S`` after its last placement. Requests without a tenant are one tenant of their own.

The script that places a request evaluates the level (``statestore/lua/shared/shares.lua``, ``level_of``), as it does
the weights of a placement: the rule is the figures that are defined here and sent with the request (windows, levels,
step, weight, instances), and the script puts its books into them. It decides nothing else by it: who is passed over, a
plan in Python says (``scheduling.queues.queue_order``). A replica cannot evaluate it: the level sets the place in the
queue at which the same script enters the request, and it follows from books that every placement of every replica
changes. A replica would judge by books of an earlier moment, in which all requests of a burst that are on their way
are still missing; and to place first and rank afterwards would be a second round trip for every request. No other code
computes levels; the simulator runs the same script.
"""

from __future__ import annotations

import math
from typing import Final

from dualmap.scheduling.values import value

SENT_WINDOW_S: Final = 10.0
"""Time in which the work that was sent decays by the factor e: two SLOs."""
GIVEN_WINDOW_S: Final = 60.0
"""Time in which the work that was given decays by the factor e."""
HELD_WINDOW_S: Final = 3600.0
"""Time in which held memory decays: so the books forget memory whose end was lost, as its instance was removed."""
ACTIVE_S: Final = 30.0
LEVELS_FROM: Final = 0.7
"""The part of its share that a tenant may have got on level 1."""
LEVEL_STEP: Final = 1.05
LEVELS: Final = 48
"""A number of levels that reaches to ten times that part."""
FIRST_ABOVE: Final = 2
"""The first level of tenants that got more than their share."""
NO_TENANT_WEIGHT: Final = 1.0
"""The weight of all requests without a tenant together."""
NO_TENANT: Final = "-"
"""The name in the books of requests without a tenant. No tenant is called so."""


@value
class Share:
    """The figures of a request's tenant that the store needs to place it."""

    name: str
    """The tenant's name in the books."""
    weight: float
    instances: int
    """Ready instances: the fleet's work in each second."""


@value
class Standing:
    """A tenant's place among others when a request of it was placed, without that request."""

    level: int
    sent_s: float
    """The work that it sent lately, in seconds of an instance."""
    share_s: float
    """The tenant's share of the fleet's work in that time."""


@value
class Work:
    """The work of an active tenant that instances were given lately."""

    given_s: float
    """Seconds of an instance, of about the last ``GIVEN_WINDOW_S``."""
    part: float
    """The part that this is of the work that they were given of all tenants."""
    share: float
    """The part that is its share by weight."""


def keeps_back(band: int, other: int) -> bool:
    """Whether a late request in a band of a queue goes before any in another band, on time or not: they are of one
    class, its tenant got no more than its share when it was placed, and the other's got more."""
    return band // LEVELS == other // LEVELS and band % LEVELS < FIRST_ABOVE <= other % LEVELS


def grown(work_s: float, held: float, since_ms: float, now_ms: int) -> float:
    """The work that a book of given work has by now, of what it had at a time from which on so much memory was held."""
    past_s = max(0, now_ms - since_ms) / 1000
    left = math.exp(-past_s / GIVEN_WINDOW_S)
    return work_s * left + held * (math.exp(-past_s / HELD_WINDOW_S) - left) / (1 / GIVEN_WINDOW_S - 1 / HELD_WINDOW_S)
