"""Legs: the parts in which a request is served. A *split* request has two, on two instances; any other is *whole*.

A prefill leg computes the prompt's KV on a prefill-capable instance, which then stages it. A decode leg takes it over
on a decode-capable instance and answers. In the store they are two requests of one owner. Each says how it counts:

- whole: uncached tokens until its first token, its prompt and its assumed output as context while it runs;
- prefill: the same, its prompt alone as context: staged KV takes that memory until the decoder has it;
- decode: prefilled from the start, so its context alone. Its uncached tokens are those to transfer, and count nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from dualmap.scheduling.state.instance import Role


class Leg(StrEnum):
    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


ROLES: Mapping[Leg, frozenset[Role]] = {
    Leg.WHOLE: frozenset(Role),
    Leg.PREFILL: frozenset({Role.PREFILL, Role.MIXED}),
    Leg.DECODE: frozenset({Role.DECODE, Role.MIXED}),
}
"""Roles that can serve a leg. Whole requests go to decode-capable instances, and to others where there is none."""


def serves(role: Role, leg: Leg) -> bool:
    """Whether an instance of this role can serve the leg."""
    return role in ROLES[leg]


_DECODE_SUFFIX = "~decode"
"""No client's request id has a tilde."""


def decode_leg_id(request_id: str) -> str:
    """The id of the decode leg of a split request."""
    return request_id + _DECODE_SUFFIX


def request_id_of(leg_id: str) -> str:
    """The id of the request that a leg is of."""
    return leg_id.removesuffix(_DECODE_SUFFIX)
