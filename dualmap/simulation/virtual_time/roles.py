"""Roles of a fleet's instances, in the field's short form: ``4P4D`` are 4 prefill and 4 decode instances."""

from __future__ import annotations

import re

from dualmap.scheduling.state.instance import Role
from dualmap.simulation.errors import SimulationError

LETTERS = {"P": Role.PREFILL, "D": Role.DECODE, "M": Role.MIXED}
_PART = re.compile(r"(\d+)([PDM])")


class RolesError(SimulationError, ValueError):
    """Roles that cannot be understood, or do not fit the fleet."""


def roles_of(text: str) -> tuple[Role, ...]:
    """The roles of ``6P2D`` or ``2P2D4M`` by number of the instance.

    Raises:
        RolesError: another form, or no instance that can prefill, or none that can decode.
    """
    if not text or _PART.sub("", text.upper()):
        raise RolesError(f"roles must read as 4P4D or 2P2D4M (prefill, decode, mixed), found {text!r}")
    roles = tuple(LETTERS[letter] for count, letter in _PART.findall(text.upper()) for _ in range(int(count)))
    if not {Role.PREFILL, Role.MIXED} & set(roles) or not {Role.DECODE, Role.MIXED} & set(roles):
        raise RolesError(f"roles {text!r} need an instance that prefills and one that decodes")
    return roles


def roles_for(text: str, instances: int) -> tuple[Role, ...]:
    """The roles of ``instances`` in the shares of ``text``: 16P16D of 32 for ``4P4D``.

    Raises:
        RolesError: as ``roles_of``, or the shares are no whole numbers.
    """
    roles = roles_of(text)
    if instances * roles.count(Role.PREFILL) % len(roles) or instances * roles.count(Role.DECODE) % len(roles):
        raise RolesError(f"{instances} instances cannot have the roles {text}: they are no multiple of {len(roles)}")
    return tuple(role for role in dict.fromkeys(roles) for _ in range(instances * roles.count(role) // len(roles)))
