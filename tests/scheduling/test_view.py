from __future__ import annotations

import pytest

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceSpec, InstanceState, Role
from scheduling.legs import Leg
from scheduling.ring import DualRing
from scheduling.view import ClusterView, takers


def spec(name: str, state: InstanceState = InstanceState.READY, role: Role = Role.MIXED) -> InstanceSpec:
    return InstanceSpec(name, f"http://{name}", role=role, state=state)


def view(*specs: InstanceSpec, previous: ClusterView | None = None, epoch: int = 1) -> ClusterView:
    return ClusterView.build(
        epoch=epoch,
        tree_version=1,
        instances={each.instance_id: each for each in specs},
        tree=HotnessTree(),
        virtual_nodes=16,
        previous=previous,
    )


def test_only_ready_instances_that_prefill_are_scheduled() -> None:
    built = view(
        spec("prefill", role=Role.PREFILL),
        spec("mixed"),
        spec("decode", role=Role.DECODE),
        *(spec(f"x-{state}", state) for state in InstanceState if state is not InstanceState.READY),
    )

    assert built.ready == built.rings.members == ("mixed", "prefill")
    assert len(built.instances) == 7


def test_where_a_pool_is_split_whole_requests_and_decode_legs_go_to_those_that_decode() -> None:
    built = view(spec("p", role=Role.PREFILL), spec("m"), spec("d", role=Role.DECODE))

    decoding = built.of(Leg.DECODE)
    assert built.of(Leg.WHOLE) is decoding
    assert decoding.ready == decoding.rings.members == ("d", "m")
    assert (built.roles, decoding.roles) == ((Role.MIXED, Role.PREFILL), (Role.DECODE, Role.MIXED))
    assert built.of(Leg.PREFILL) is built


@pytest.mark.parametrize("roles", [[Role.MIXED], [Role.PREFILL], [Role.DECODE]])
def test_in_a_pool_of_one_role_nothing_is_split(roles: list[Role]) -> None:
    built = view(*(spec(f"{role}{number}", role=role) for role in roles for number in (1, 2)))

    assert built.decoding is None
    assert len(built.ready) == 2


def test_both_sides_rings_are_kept_while_their_members_stay() -> None:
    former = view(spec("p", role=Role.PREFILL), spec("d", role=Role.DECODE))

    built = view(
        spec("p", role=Role.PREFILL), spec("d", role=Role.DECODE), spec("q", role=Role.PREFILL), previous=former
    )

    assert former.decoding is not None
    assert built.decoding is not None
    assert built.decoding.rings is former.decoding.rings
    assert built.rings == DualRing.of(["p", "q"], 16)


def test_whole_requests_are_taken_by_prefill_instances_only_where_none_decodes() -> None:
    prefill, decode = spec("p", role=Role.PREFILL), spec("d", role=Role.DECODE)

    assert takers({"p": prefill, "d": decode}, Leg.WHOLE) == {"d"}
    assert takers({"p": prefill}, Leg.WHOLE) == {"p"}
    assert takers({"p": prefill, "d": decode}, Leg.PREFILL) == {"p"}


def test_a_view_built_on_the_former_one_equals_one_built_from_nothing() -> None:
    former = view(spec("a"), spec("b"), spec("c"))

    built = view(spec("b"), spec("c", InstanceState.DOWN), spec("d"), previous=former)

    assert built.rings == DualRing.of(["b", "d"], 16)


def test_rings_are_kept_as_they_are_while_the_members_stay() -> None:
    former = view(spec("a"), spec("b"))

    built = view(spec("a"), spec("b"), spec("c", InstanceState.STARTING), previous=former, epoch=2)

    assert built.rings is former.rings
    assert built.epoch == 2


def test_a_pool_without_instances_has_empty_rings() -> None:
    assert view().rings.pair(1) == ()


def test_the_pool_has_the_block_size_that_most_instances_report() -> None:
    def view_of(*sizes: int) -> ClusterView:
        return view(*(InstanceSpec(f"i{at}", "http://x", block_tokens=size) for at, size in enumerate(sizes)))

    assert view_of(0, 0).block_tokens is None
    assert view_of(0, 32, 16, 16).block_tokens == 16
    assert view_of(32, 16).block_tokens == 16
