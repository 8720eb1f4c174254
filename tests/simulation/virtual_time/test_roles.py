from __future__ import annotations

import pytest

from dualmap.scheduling.state.instance import Role
from dualmap.simulation.virtual_time.roles import RolesError, roles_for, roles_of


def test_the_short_form_names_the_roles_in_its_order() -> None:
    assert roles_of("2P1d") == (Role.PREFILL, Role.PREFILL, Role.DECODE)
    assert roles_of("1P1D2M") == (Role.PREFILL, Role.DECODE, Role.MIXED, Role.MIXED)


def test_a_larger_fleet_has_the_same_shares() -> None:
    roles = roles_for("6P2D", 32)
    assert (roles.count(Role.PREFILL), roles.count(Role.DECODE)) == (24, 8)
    assert roles_for("4P4D", 2) == (Role.PREFILL, Role.DECODE)


@pytest.mark.parametrize("text", ["", "4X", "P4D4", "4P 4D", "4P", "8D", "0P4D", "4P0D"])
def test_roles_that_serve_nothing_or_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(RolesError, match="roles"):
        roles_of(text)


def test_shares_that_are_no_whole_instances_are_refused() -> None:
    with pytest.raises(RolesError, match="10 instances cannot have the roles 5P3D"):
        roles_for("5P3D", 10)
