from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.ring import DualRing
from dualmap.scheduling.state.view import ClusterView, takers


def spec(
    name: str, state: InstanceState = InstanceState.READY, role: Role = Role.MIXED, models: dict[str, str] | None = None
) -> InstanceSpec:
    return InstanceSpec(name, f"http://{name}", role=role, state=state, models=models)


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
    assert built.kv_capacity_tokens == 2 * spec("mixed").kv_capacity_tokens
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


# model names -----------------------------------------------------------------------------------------------------
BASE, TUNED = {"qwen": ""}, {"qwen": "", "sql": "qwen"}


def test_a_name_is_served_by_the_instances_that_list_it_and_by_those_whose_list_is_not_known() -> None:
    built = view(spec("a", models=BASE), spec("b", models=TUNED), spec("c", models={"llama": ""}), spec("d"))

    served = {name: built.serving(name).ready for name in ("qwen", "sql", "llama")}
    assert served == {"qwen": ("a", "b", "d"), "sql": ("b", "d"), "llama": ("c", "d")}
    assert built.serving("sql").rings == DualRing.of(["b", "d"], 16)
    assert built.stored_name("sql") == "sql"


@pytest.mark.parametrize("models", [None, BASE])
def test_where_all_list_the_same_no_name_is_told_from_another(models: dict[str, str] | None) -> None:
    built = view(spec("a", models=models), spec("b", models=models and dict(models)))

    assert all(built.serving(name) is built and built.stored_name(name) == "" for name in ("qwen", "sql", ""))


def test_a_name_that_nobody_lists_is_left_to_the_engines_to_judge() -> None:
    built = view(spec("a", models=BASE), spec("b", models=TUNED))

    assert built.serving("loaded when asked for") is built
    assert built.stored_name("") == ""


def test_a_name_whose_instances_are_down_is_not_sent_to_those_that_do_not_serve_it() -> None:
    built = view(spec("a", models=BASE), spec("b", InstanceState.DOWN, models=TUNED))

    assert built.serving("sql").ready == ()
    assert built.serving("qwen") is built


def test_the_instances_of_a_name_are_found_once_for_a_view_and_their_rings_are_changed_not_made() -> None:
    former = view(spec("a", models=BASE), spec("b", models=TUNED), spec("c", models=TUNED))
    group = former.serving("sql")
    assert former.serving("sql") is group
    assert group.rings == DualRing.of(["b", "c"], 16)

    built = view(spec("a", models=TUNED), spec("b", models=TUNED), spec("c", models=BASE), previous=former)
    assert built.serving("sql").rings == DualRing.of(["a", "b"], 16)
    same = view(spec("a", models=BASE), spec("b", models=TUNED), spec("c", models=TUNED), previous=former)
    assert same.serving("sql").rings is group.rings
    assert built == view(spec("a", models=TUNED), spec("b", models=TUNED), spec("c", models=BASE))


def test_where_a_pool_is_split_each_leg_of_a_name_is_served_by_those_that_list_it() -> None:
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
    built = view(*(spec(name, role=role, models=TUNED if name in "qe" else BASE) for name, role in roles.items()))

    group = built.serving("sql")
    assert (group.ready, group.of(Leg.DECODE).ready) == (("q",), ("e",))
    assert takers(built.instances, Leg.DECODE, "sql") == {"e"}
    assert takers(built.instances, Leg.DECODE) == {"d", "e"}


def test_names_that_the_same_instances_serve_share_their_rings() -> None:
    many = {"qwen": "", **{f"adapter-{number}": "qwen" for number in range(20)}}
    built = view(spec("a", models=BASE), spec("b", models=many), spec("c", models=many))

    assert len({id(built.serving(name)) for name in many if name != "qwen"}) == 1


def test_a_revision_has_rings_of_its_own_and_others_stand_in_where_none_of_it_is_ready() -> None:
    labels = {"a": "v1", "b": "v1", "c": "v2", "d": ""}
    instances = {
        name: InstanceSpec(name, f"http://{name}", state=InstanceState.READY, revision=label)
        for name, label in labels.items()
    }
    built = ClusterView.build(epoch=1, tree_version=1, instances=instances, tree=HotnessTree())

    assert built.serving("", "v1").ready == ("a", "b")
    assert built.serving("", "v1").rings == DualRing.of(("a", "b"))
    assert built.serving("", "unlabelled").ready == ("d",)
    assert built.serving("", "v1") is built.serving("", "v1"), "it is made once"
    assert built.serving("", "v9").ready == built.serving("").ready == ("a", "b", "c", "d")
    assert built.ready_revisions == {"v1", "v2", "unlabelled"}
    assert takers(instances, Leg.WHOLE, revision="v2") == {"c"}

    down = {**instances, "c": replace(instances["c"], state=InstanceState.DOWN)}
    later = ClusterView.build(epoch=2, tree_version=1, instances=down, tree=HotnessTree(), previous=built)
    assert later.serving("", "v2").ready == ("a", "b", "d")
    assert later.serving("", "v1").rings == DualRing.of(("a", "b"))
    assert later.ready_revisions == {"v1", "unlabelled"}


def test_a_view_does_not_keep_the_views_before_it() -> None:
    """Every instance serves the name "m", so that its group is the view itself."""
    built, kept = None, []
    for _ in range(3):
        for _ in range(10):
            built = view(spec("a", models={"m": "", "x": "m"}), spec("b", models={"m": ""}), previous=built)
            assert built.serving("m") is built
            assert built.serving("x").ready == ("a",)
        gc.collect()
        kept.append(sum(isinstance(each, ClusterView) for each in gc.get_objects()))

    assert kept[0] == kept[2]
