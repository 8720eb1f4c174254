"""Properties of all policies that look at every instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.view import ClusterView

GenerationRequest = Callable[..., RouteQuery]
Build = Callable[..., Policy]
Choose = Callable[..., Decision]
Load = Callable[..., InstanceLoad]
View = Callable[..., ClusterView]

FLEET_POLICIES = [
    "round-robin", "least-loaded", "min-ttft", "preble", "dynamo", "vllm-kv-aware", "sglang", "llm-d", "llm-d-latency",
]  # fmt: skip

every = pytest.mark.parametrize("name", FLEET_POLICIES)


@every
def test_all_ready_instances_are_candidates_except_those_that_failed(
    name: str, policy: Build, query: GenerationRequest, view: View
) -> None:
    cluster = view(["a", "b", "c"])

    assert policy(name).candidates(query(), cluster) == ("a", "b", "c")
    assert policy(name).candidates(query(excluded=frozenset({"b"})), cluster) == ("a", "c")


@every
def test_a_missing_draining_or_excluded_instance_is_never_chosen(
    name: str, choose: Choose, load: Load, query: GenerationRequest
) -> None:
    loads = load("gone", state=InstanceState.DRAINING, hit_blocks=10), load("bad", hit_blocks=10), load("good")

    decision = choose(name, *loads, ask=query(excluded=frozenset({"bad"})))

    assert (decision.instance_id, decision.alternative_id, decision.reason) == ("good", None, Reason.ONLY_ONE)


@every
def test_nobody_left_is_an_error_that_says_so(name: str, policy: Build, query: GenerationRequest, view: View) -> None:
    with pytest.raises(NoInstanceError, match="no instance is ready"):
        policy(name).candidates(query(), view([]))
    with pytest.raises(NoInstanceError, match="every ready instance is excluded"):
        policy(name).candidates(query(excluded=frozenset({"a"})), view(["a"]))
    with pytest.raises(NoInstanceError):
        policy(name).choose(query(), {})


@every
def test_equals_take_turns_and_name_another_as_alternative(
    name: str, choose: Choose, load: Load, query: GenerationRequest
) -> None:
    loads = [load(f"i{number}") for number in range(4)]

    decisions = [choose(name, *loads, ask=query(sequence=number)) for number in range(8)]

    assert Counter(decision.instance_id for decision in decisions) == {f"i{number}": 2 for number in range(4)}
    assert all(decision.alternative_id not in (None, decision.instance_id) for decision in decisions)


@every
def test_the_decision_says_what_it_expects(name: str, choose: Choose, load: Load, query: GenerationRequest) -> None:
    loads = [load(f"i{number}", hit_blocks=number, pending_tokens=100) for number in range(3)]

    decision = choose(name, *loads, ask=query(sequence=1))

    hits = int(decision.instance_id[1:])
    assert decision.hit_blocks == hits
    assert decision.uncached_tokens == 1000 - 100 * hits
    assert decision.expected_ttft_s == pytest.approx(0.1 + decision.uncached_tokens / 1000)


@every
def test_held_requests_stay_where_these_policies_put_them(name: str, policy: Build) -> None:
    assert not policy(name).rebalances
