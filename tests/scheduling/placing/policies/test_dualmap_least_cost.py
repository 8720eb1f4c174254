"""Policy dualmap-least-cost: what it weighs. Whom it looks at beyond the pair is the store's contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.state.hotness import HashKey
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.view import ClusterView

Choose = Callable[..., Decision]
Load = Callable[..., InstanceLoad]
Query = Callable[..., RouteQuery]
NAME = "dualmap-least-cost"


@pytest.mark.parametrize(("pending_tokens", "chosen"), [(1150, "cached"), (1250, "idle")])
def test_recompute_weighs_several_times_its_own_seconds(
    choose: Choose, load: Load, pending_tokens: int, chosen: str
) -> None:
    # given 400 ms of recompute more on the idle one, at a weight of 3: 1.2 s
    cached = load("cached", hit_blocks=4, pending_tokens=pending_tokens)

    assert choose(NAME, load("idle"), cached).instance_id == chosen


@pytest.mark.parametrize(("pending_tokens", "chosen"), [(550, "cached"), (650, "idle")])
def test_recompute_of_a_hot_prefix_weighs_its_own_seconds(
    choose: Choose, load: Load, query: Query, pending_tokens: int, chosen: str
) -> None:
    # given 400 ms of recompute more on the idle one, 300 of it in a hot prefix: 0.3 s and three times 0.1 s
    cached = load("cached", hit_blocks=4, pending_tokens=pending_tokens)

    assert choose(NAME, load("idle"), cached, ask=query(key=HashKey(1, 1, 300, 0, 0))).instance_id == chosen


def test_recompute_weighs_more_where_running_requests_crowd_the_kv_memory(choose: Choose, load: Load) -> None:
    # given a fifth more of the prompt to compute where the memory is full, and 0.9 s of work elsewhere for it
    full = {"context_tokens": 1_000_000}
    loads = load("crowded", **full), load("cached", **full, hit_blocks=2, pending_tokens=900)

    assert choose(NAME, *loads).instance_id == "cached"
    assert choose(NAME, *loads, policy_options={"crowding_weight": 0.0}).instance_id == "crowded"


def test_deferred_work_hardly_counts(choose: Choose, load: Load) -> None:
    late = load("late", pending_tokens=10_000, deferred_tokens=10_000)

    assert choose(NAME, load("busy", pending_tokens=1000), late).instance_id == "late"
    assert choose(NAME, load("idle", pending_tokens=100), late).instance_id == "idle"


def test_progress_of_the_prefill_under_way_is_taken_off(choose: Choose, load: Load) -> None:
    # given 2 s dispatched to each, the one 1.5 s into it
    fresh = load("fresh", pending_tokens=2000, dispatched_tokens=2000)
    nearly_done = load("nearly-done", pending_tokens=2000, dispatched_tokens=2000, stalled_s=1.5)

    decision = choose(NAME, fresh, nearly_done)

    assert decision.instance_id == "nearly-done"
    expected_s = 0.5 + 0.9 + 0.0015 + 0.03
    assert decision.expected_ttft_s == pytest.approx(expected_s), "what is left, its own, and a step to wait for"


@pytest.mark.parametrize(("pending_tokens", "chosen"), [(3000, "busy"), (3400, "full")])
def test_kv_memory_in_use_weighs_by_its_share(choose: Choose, load: Load, pending_tokens: int, chosen: str) -> None:
    # given 3.2 s more at a weight of 4 s for a full one, the prompt being cached
    full = load("full", context_tokens=900_000, hit_blocks=10)
    busy = load("busy", pending_tokens=pending_tokens, context_tokens=100_000, hit_blocks=10)

    assert choose(NAME, full, busy, policy_options={"crowding_weight": 0.0}).instance_id == chosen


def test_reuse_that_would_miss_the_slo_yields_to_recompute_that_meets_it(choose: Choose, load: Load) -> None:
    # given a cost of 5.25 s where the prompt is cached, 0.08 s past the SLO, and of 9.6 s elsewhere, on time
    cached = load("cached", hit_blocks=9, pending_tokens=4950)
    busy = load("busy", pending_tokens=3000, context_tokens=900_000)
    plain = {"crowding_weight": 0.0}

    assert choose(NAME, busy, cached, policy_options=plain).instance_id == "cached", "a miss costs half an SLO"
    assert choose(NAME, busy, cached, policy_options={**plain, "miss_penalty": 2.0}).instance_id == "busy"


def test_reuse_is_kept_when_all_miss_the_slo(choose: Choose, load: Load) -> None:
    cached = load("cached", hit_blocks=9, pending_tokens=8000)

    assert choose(NAME, load("busy", pending_tokens=5500), cached).instance_id == "cached"


@pytest.mark.parametrize(
    ("chosen", "others", "excluded", "reason"),
    [
        ("c", "ab", "", Reason.BEYOND_PAIR),
        ("c", "d", "ab", Reason.BEYOND_PAIR),
        ("a", "b", "cd", Reason.COST),
        ("b", "", "", Reason.ONLY_ONE),
    ],
)
def test_the_reason_tells_where_the_choice_is_from(
    choose: Choose, query: Query, load: Load, chosen: str, others: str, excluded: str, reason: Reason
) -> None:
    loads = [*(load(name, pending_tokens=9000) for name in others), load(chosen)]

    decision = choose(NAME, *loads, ask=query(excluded=frozenset(excluded), pair=("a", "b")))

    assert (decision.instance_id, decision.reason) == (chosen, reason)


def test_the_deepest_hit_is_a_reason_unless_another_has_as_much(choose: Choose, query: Query, load: Load) -> None:
    ask = query(pair=("a", "b"))

    assert choose(NAME, load("a"), load("b", hit_blocks=9), ask=ask).reason is Reason.CACHE
    assert choose(NAME, load("a", hit_blocks=9), load("b", hit_blocks=9), ask=ask).reason is Reason.COST


def test_without_load_the_pair_decides_and_ties_go_to_the_first_ring(
    policy: Callable[..., Policy], view: Callable[..., ClusterView], choose: Choose, query: Query, load: Load
) -> None:
    pair = policy(NAME).candidates(query(), view(f"i{number}" for number in range(8)))

    assert choose(NAME, *(load(name) for name in (*pair, "elsewhere"))).instance_id == pair[0]


def test_instances_that_are_not_ready_are_never_chosen(choose: Choose, load: Load) -> None:
    down = load("down", hit_blocks=9, state=InstanceState.DOWN)

    assert choose(NAME, down, load("up", pending_tokens=9000)).instance_id == "up"
