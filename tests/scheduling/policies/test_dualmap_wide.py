"""Policy dualmap-wide: what it weighs, whom it asks beyond the pair, and that asking stays rare and small."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduling.decision import Decision, Horizon, Policy, Reason, RouteQuery, SecondLook
from scheduling.instance import InstanceLoad, InstanceState
from scheduling.view import ClusterView

Choose = Callable[..., Decision]
Load = Callable[..., InstanceLoad]
Query = Callable[..., RouteQuery]
MakePolicy = Callable[..., Policy]
NAME = "dualmap-wide"


def looks(policy: Policy, query: RouteQuery, horizon: Horizon, *loads: InstanceLoad) -> tuple[str, ...]:
    answer = policy.choose_or_look(query, {load.instance_id: load for load in loads}, horizon)
    return answer.instance_ids if isinstance(answer, SecondLook) else ()


def test_recompute_weighs_several_times_its_own_seconds(choose: Choose, load: Load) -> None:
    # given 400 ms of recompute more on the idle one, at a weight of 3: 1.2 s
    cached = load("cached", hit_blocks=4, pending_tokens=1150, dispatched_tokens=0)

    assert choose(NAME, load("idle"), cached).instance_id == "cached"
    assert choose(NAME, load("idle"), load("cached", hit_blocks=4, pending_tokens=1250)).instance_id == "idle"


def test_work_that_stepped_behind_hardly_counts(choose: Choose, load: Load) -> None:
    late = load("late", hit_blocks=2, pending_tokens=10_000, behind_tokens=10_000)

    assert choose(NAME, load("busy", pending_tokens=1000), late).instance_id == "late"


def test_progress_of_the_prefill_under_way_is_taken_off(choose: Choose, load: Load) -> None:
    # given 4 s dispatched to each, the one 3 s into it
    fresh = load("fresh", pending_tokens=4000, dispatched_tokens=4000)
    nearly_done = load("nearly-done", pending_tokens=4000, dispatched_tokens=4000, stalled_s=3.0)

    decision = choose(NAME, fresh, nearly_done)

    assert decision.instance_id == "nearly-done"
    assert decision.expected_ttft_s == pytest.approx(1.0 + 1.0 + 0.03), "what is left, its own, and a step to wait for"


def test_an_engine_silent_for_longer_than_its_work_needs_is_stalled(choose: Choose, load: Load) -> None:
    # given 1 s of work and no prefill for 5 s: 4 s too long
    stuck = load("stuck", pending_tokens=1000, dispatched_tokens=1000, stalled_s=5.0)

    assert choose(NAME, stuck, load("busy", pending_tokens=3500)).instance_id == "busy"


def test_kv_memory_in_use_weighs_by_its_share(choose: Choose, load: Load) -> None:
    # given 3.2 s more at a weight of 4 s for a full one
    full = load("full", context_tokens=900_000)

    assert choose(NAME, full, load("busy", pending_tokens=3000, context_tokens=100_000)).instance_id == "busy"
    assert choose(NAME, full, load("busier", pending_tokens=3400, context_tokens=100_000)).instance_id == "full"


def test_whoever_has_more_kv_memory_left_is_asked_once_the_pair_has_work(
    policy: MakePolicy, query: Query, load: Load
) -> None:
    # given a pair that has 0.3 s of work, 3.6 s for its KV memory, and all of the prompt cached but a tenth
    horizon = Horizon(lightest=(("c", 3.5), ("d", 3.95)))
    pair = [load(name, hit_blocks=9, pending_tokens=300, context_tokens=900_000) for name in ("a", "b")]

    assert looks(policy(NAME), query(), horizon, *pair) == ("c",)


def test_nobody_is_asked_for_the_kv_memory_of_an_idle_pair(policy: MakePolicy, query: Query, load: Load) -> None:
    pair = [load(name, context_tokens=900_000) for name in ("a", "b")]

    assert looks(policy(NAME), query(), Horizon(lightest=(("c", 0.0),)), *pair) == ()


def test_an_idle_pair_with_the_deepest_known_hit_asks_nobody_else(policy: MakePolicy, query: Query, load: Load) -> None:
    horizon = Horizon(holders=("c",), holder_blocks=6, lightest=(("d", 0.0),))

    assert looks(policy(NAME), query(), horizon, load("a", hit_blocks=6), load("b")) == ()


def test_whoever_holds_more_of_the_prefix_is_asked(policy: MakePolicy, query: Query, load: Load) -> None:
    horizon = Horizon(holders=("c", "a"), holder_blocks=8)

    assert looks(policy(NAME), query(), horizon, load("a"), load("b")) == ("c",)


def test_the_lightest_are_asked_while_they_could_still_be_cheaper(policy: MakePolicy, query: Query, load: Load) -> None:
    horizon = Horizon(lightest=(("c", 0.5), ("d", 2.5)))

    assert looks(policy(NAME), query(), horizon, load("a", pending_tokens=2000), load("b", pending_tokens=3000)) == (
        "c",
    )


def test_instances_the_request_failed_on_are_not_asked_again(policy: MakePolicy, query: Query, load: Load) -> None:
    horizon = Horizon(holders=("c",), holder_blocks=9, lightest=(("d", 0.0),))
    failed = query(excluded=frozenset({"c", "d"}))

    assert looks(policy(NAME), failed, horizon, load("a", pending_tokens=9000), load("b", pending_tokens=9000)) == ()


@pytest.mark.parametrize(("excluded", "busy"), [("", "ab"), ("a", "b"), ("ab", "d")])
def test_a_choice_beyond_the_pair_says_so(excluded: str, busy: str, choose: Choose, query: Query, load: Load) -> None:
    asked = [load(name, pending_tokens=9000) for name in busy]

    decision = choose(NAME, *asked, load("c"), ask=query(excluded=frozenset(excluded), pair=("a", "b")))

    assert (decision.instance_id, decision.reason) == ("c", Reason.BEYOND_PAIR)
    assert decision.alternative_id in [*busy]


def test_a_choice_within_the_pair_says_so_whoever_else_is_excluded(choose: Choose, query: Query, load: Load) -> None:
    ask = query(excluded=frozenset({"c", "d"}), pair=("a", "b"))

    assert choose(NAME, load("a"), load("b", pending_tokens=9000), ask=ask).reason is Reason.COST
    assert choose(NAME, load("b"), ask=ask).reason is Reason.ONLY_ONE


def test_without_load_the_pair_decides_and_ties_go_to_the_first_ring(
    policy: MakePolicy, view: Callable[..., ClusterView], query: Query, load: Load
) -> None:
    request = query()
    pair = policy(NAME).candidates(request, view(f"i{number}" for number in range(8)))

    decision = policy(NAME).choose(request, {name: load(name) for name in (*pair, "elsewhere")})

    assert decision.instance_id == pair[0]


def test_instances_that_are_not_ready_are_never_chosen(choose: Choose, load: Load) -> None:
    down = load("down", hit_blocks=9, state=InstanceState.DOWN)

    assert choose(NAME, down, load("up", pending_tokens=9000)).instance_id == "up"


def test_reuse_that_would_miss_the_slo_yields_to_recompute_that_meets_it(choose: Choose, load: Load) -> None:
    # given 900 ms of recompute more on the idle one: 5.4 s of weight, yet on time
    cached = load("cached", hit_blocks=9, pending_tokens=5200)

    assert choose(NAME, load("idle"), cached).instance_id == "idle"


def test_reuse_is_kept_when_everybody_misses_the_slo(choose: Choose, load: Load) -> None:
    cached = load("cached", hit_blocks=9, pending_tokens=8000)

    assert choose(NAME, load("busy", pending_tokens=5500), cached).instance_id == "cached"
