"""The actions from the members towards what was found, one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.workers.discovery.plan import Act, Action, Found, described_after, plan_round

FOUND = Found("a", "u1", "http://10.0.0.1:8000")
ORIGIN = {"uid": "u1", "role": "mixed"}
LEAVING = {**ORIGIN, "leaving": "its pod is not ready"}
MEMBER = InstanceSpec("a", FOUND.url, state=InstanceState.READY, origin=ORIGIN)
AWAY = replace(FOUND, not_serving="its pod is not ready")
ENDING = replace(FOUND, not_serving="its pod terminates", is_ending=True)

_S = InstanceState


def acts(found: Found | None, member: InstanceSpec | None) -> list[Act]:
    plan = plan_round({} if found is None else {"a": found}, {} if member is None else {"a": member})
    return [action.act for action in plan.actions]


@pytest.mark.parametrize(
    ("found", "member", "wanted"),
    [
        (FOUND, None, [Act.ENTER]),
        (AWAY, None, []),
        (FOUND, MEMBER, []),
        (FOUND, replace(MEMBER, state=_S.DOWN), []),  # health checks decide
        (FOUND, replace(MEMBER, state=_S.STANDBY), []),  # an operator drained it
        (AWAY, replace(MEMBER, state=_S.STANDBY), []),
        (ENDING, replace(MEMBER, state=_S.STANDBY), [Act.DRAIN]),
        (None, replace(MEMBER, state=_S.STANDBY), [Act.DRAIN]),
        (replace(FOUND, uid="u2"), MEMBER, [Act.REPLACE]),
        (replace(FOUND, url="http://10.0.0.2:8000"), MEMBER, [Act.REPLACE]),
        (replace(FOUND, role=Role.DECODE), MEMBER, [Act.CHANGE_ROLE]),
        (replace(FOUND, aliases=("gpt",)), MEMBER, [Act.CHANGE_ALIASES]),
        (FOUND, replace(MEMBER, origin={**ORIGIN, "aliases": "gpt"}), [Act.CHANGE_ALIASES]),
        (replace(FOUND, aliases=("gpt",)), replace(MEMBER, origin={**ORIGIN, "aliases": "gpt"}), []),
        (replace(FOUND, revision="v2"), MEMBER, [Act.CHANGE_REVISION]),
        (replace(FOUND, revision="v2"), replace(MEMBER, revision="v2"), []),
        (FOUND, replace(MEMBER, role=Role.DECODE), []),  # the leader moved it
        (AWAY, MEMBER, [Act.DRAIN]),
        (ENDING, MEMBER, [Act.DRAIN]),
        (None, MEMBER, [Act.DRAIN]),
        (None, replace(MEMBER, state=_S.DRAINING, origin=LEAVING), []),
        (None, replace(MEMBER, state=_S.STANDBY, origin=LEAVING), [Act.REMOVE]),
        (None, replace(MEMBER, state=_S.STARTING, origin=LEAVING), [Act.DRAIN]),  # somebody resumed it
        (FOUND, replace(MEMBER, state=_S.DRAINING, origin=LEAVING), [Act.RESUME]),
        (FOUND, replace(MEMBER, state=_S.STANDBY, origin=LEAVING), [Act.RESUME]),
        (FOUND, replace(MEMBER, origin=None), []),
        (None, replace(MEMBER, origin=None), []),
    ],
)
def test_the_next_step_of_an_instance(found: Found | None, member: InstanceSpec | None, wanted: list[Act]) -> None:
    assert acts(found, member) == wanted


@pytest.mark.parametrize(
    ("state", "origin", "after"),
    [
        (_S.READY, ORIGIN, _S.STARTING),
        (_S.DOWN, ORIGIN, _S.STARTING),
        (_S.DRAINING, LEAVING, _S.STARTING),
        (_S.STANDBY, LEAVING, _S.STARTING),
        (_S.DRAINING, ORIGIN, _S.STANDBY),  # an operator took it out: its successor stays out
        (_S.STANDBY, ORIGIN, _S.STANDBY),
    ],
)
def test_a_replaced_instance_starts_unless_an_operator_took_it_out(
    state: InstanceState, origin: dict[str, str], after: InstanceState
) -> None:
    action = Action(Act.REPLACE, "a", replace(FOUND, uid="u2", url="http://10.0.0.2:8000"))
    spec = described_after(action, replace(MEMBER, state=state, origin=origin, kv_capacity_tokens=5, models={"m": ""}))

    assert spec is not None and spec.state is after
    assert (spec.url, spec.origin, spec.models) == ("http://10.0.0.2:8000", {"uid": "u2", "role": "mixed"}, None)
    assert spec.kv_capacity_tokens == 5


@pytest.mark.parametrize("act", list(Act))
def test_no_step_changes_what_an_operator_entered_meanwhile(act: Act) -> None:
    assert described_after(Action(act, "a", FOUND), replace(MEMBER, origin=None)) is None


@pytest.mark.parametrize("act", [act for act in Act if act is not Act.ENTER])
def test_no_step_brings_back_what_an_operator_removed_meanwhile(act: Act) -> None:
    assert described_after(Action(act, "a", FOUND), None) is None


@pytest.mark.parametrize("act", [Act.ENTER, Act.REPLACE, Act.RESUME, Act.CHANGE_ROLE])
def test_a_step_that_was_made_already_is_none(act: Act) -> None:
    """The members that a plan starts from may be a little old."""
    assert described_after(Action(act, "a", FOUND), MEMBER) is None
    left = replace(MEMBER, state=_S.DRAINING, origin=LEAVING)
    assert described_after(Action(Act.DRAIN, "a", why=LEAVING["leaving"]), left) is None


def test_a_server_that_an_operator_entered_under_another_id_is_not_entered_again() -> None:
    plan = plan_round({"a": FOUND}, {"mine": InstanceSpec("mine", FOUND.url)})

    assert plan.actions == ()
    assert plan.left_out == ("a: http://10.0.0.1:8000 is in the fleet as mine, which discovery did not enter",)


def test_a_rank_is_another_server_than_the_whole() -> None:
    plan = plan_round({"a": replace(FOUND, data_parallel_rank=1)}, {"mine": InstanceSpec("mine", FOUND.url)})

    assert [action.act for action in plan.actions] == [Act.ENTER]


def test_a_new_label_changes_the_revision_and_no_more() -> None:
    relabelled = Action(Act.CHANGE_REVISION, FOUND.instance_id, replace(FOUND, revision="v2"))

    assert described_after(relabelled, MEMBER) == replace(MEMBER, revision="v2")


def test_a_pod_in_the_place_of_another_brings_its_revision() -> None:
    another = replace(FOUND, uid="u2", revision="v2")
    after = described_after(Action(Act.REPLACE, FOUND.instance_id, another), replace(MEMBER, revision="v1"))

    assert after is not None and after.revision == "v2"
