from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.chain import Chain
from scheduling.decision import Decision, Policy, Reason, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.view import ClusterView

Choose = Callable[..., Decision]
Load = Callable[..., InstanceLoad]
Query = Callable[..., RouteQuery]


def test_the_larger_hit_is_taken_while_it_meets_the_slo(choose: Choose, load: Load) -> None:
    # given 4.5 s of queueing and 0.5 s of computing where the hit is: exactly the SLO
    cached = load("cached", hit_blocks=5, pending_tokens=4500)

    decision = choose("dualmap", load("idle"), cached)

    assert (decision.instance_id, decision.reason, decision.overloaded) == ("cached", Reason.CACHE, False)
    assert (decision.hit_blocks, decision.expected_ttft_s, decision.seen_pending_tokens) == (5, 5.0, 4500)


def test_past_the_slo_the_less_loaded_one_is_taken(choose: Choose, load: Load) -> None:
    cached = load("cached", hit_blocks=5, pending_tokens=4501)

    decision = choose("dualmap", cached, load("idle"))

    assert (decision.instance_id, decision.reason, decision.overloaded) == ("idle", Reason.SLO, False)
    assert decision.alternative_id == "cached"


def test_a_smaller_ttft_elsewhere_is_not_chased(choose: Choose, load: Load) -> None:
    # given an idle candidate that would answer in 1 s, and a hit that answers in 4 s
    decision = choose("dualmap", load("cached", hit_blocks=1, pending_tokens=3100), load("idle"))

    assert decision.instance_id == "cached"


def test_equal_hits_go_to_the_less_loaded(choose: Choose, load: Load) -> None:
    decision = choose("dualmap", load("a", hit_blocks=3, pending_tokens=20), load("b", hit_blocks=3, pending_tokens=10))

    assert (decision.instance_id, decision.reason) == ("b", Reason.BALANCE)


def test_without_queued_work_the_one_with_less_kv_memory_in_use_is_less_loaded(choose: Choose, load: Load) -> None:
    assert choose("dualmap", load("a", context_tokens=9000), load("b", context_tokens=100)).instance_id == "b"


def test_load_is_time_so_a_faster_instance_carries_more(choose: Choose, load: Load) -> None:
    fast = load("fast", pending_tokens=3000, prefill_tokens_per_s=4000.0)
    slow = load("slow", pending_tokens=1000)

    assert choose("dualmap", slow, fast).instance_id == "fast"


def test_both_past_the_slo_asks_for_the_rebalancer(choose: Choose, load: Load) -> None:
    loads = load("a", hit_blocks=2, pending_tokens=9000), load("b", pending_tokens=8000)

    decision, without = choose("dualmap", *loads), choose("dualmap-no-rebalance", *loads)

    assert (decision.instance_id, decision.reason, decision.overloaded) == ("b", Reason.BOTH_OVERLOADED, True)
    assert (without.instance_id, without.reason, without.overloaded) == ("b", Reason.BOTH_OVERLOADED, False)


def test_when_nobody_can_meet_the_slo_the_hit_may_be_kept(choose: Choose, load: Load) -> None:
    loads = load("a", hit_blocks=2, pending_tokens=9000), load("b", pending_tokens=8000)
    keep = {"when_both_late": "larger-hit"}

    decision = choose("dualmap", *loads, dualmap=keep)

    assert (decision.instance_id, decision.reason, decision.overloaded) == ("a", Reason.BOTH_OVERLOADED, True)
    assert choose("dualmap", loads[0], load("b", pending_tokens=100), dualmap=keep).instance_id == "b"


def test_a_decode_bottleneck_counts_against_the_hit(choose: Choose, load: Load) -> None:
    # given 0.5 s of computing behind 1 s of queue on an instance that has finished nothing for 4 s
    stalled = load("stalled", hit_blocks=5, pending_tokens=1000, stalled_s=4.0)

    assert choose("dualmap", stalled, load("idle")).instance_id == "idle"
    assert choose("dualmap", stalled, load("idle"), decode_stall_s=4.5).instance_id == "stalled"


def test_the_slo_is_the_request_s_own(choose: Choose, load: Load, query: Query) -> None:
    loads = load("cached", hit_blocks=5, pending_tokens=1500), load("idle")

    assert choose("dualmap", *loads, ask=query(slo_s=2.0)).instance_id == "cached"
    assert choose("dualmap", *loads, ask=query(slo_s=1.9)).instance_id == "idle"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=200))
def test_requests_of_one_prefix_meet_at_most_two_instances(
    view: Callable[..., ClusterView], policy: Callable[..., Policy], load: Load, arrivals: list[tuple[int, int]]
) -> None:
    # given requests of four prefixes, random lengths, loads that grow with every request
    cluster, dualmap = view([f"i{number}" for number in range(8)]), policy("dualmap")
    pending: dict[str, int] = {}
    met: dict[int, set[str]] = {}
    for prefix, length in arrivals:
        ask = RouteQuery(Chain(tuple(1000 * prefix + k for k in range(1, length + 1)), 100, 100 * length), slo_s=1.0)
        names = dualmap.candidates(ask, cluster)
        chosen = dualmap.choose(ask, {name: load(name, pending_tokens=pending.get(name, 0)) for name in names})
        pending[chosen.instance_id] = pending.get(chosen.instance_id, 0) + chosen.uncached_tokens
        met.setdefault(prefix, set()).add(chosen.instance_id)

    assert all(len(instances) <= 2 for instances in met.values())


@pytest.mark.parametrize("first_hits", [0, 5])
@given(
    hits=st.integers(0, 10),
    pending=st.tuples(st.integers(0, 9000), st.integers(0, 9000)),
    stalled_s=st.tuples(st.floats(0, 6), st.floats(0, 6)),
)
def test_the_choice_does_not_depend_on_which_ring_a_candidate_came_from(
    choose: Choose,
    load: Load,
    first_hits: int,
    hits: int,
    pending: tuple[int, int],
    stalled_s: tuple[float, float],
) -> None:
    a = load("a", hit_blocks=first_hits, pending_tokens=pending[0], stalled_s=stalled_s[0])
    b = load("b", hit_blocks=hits, pending_tokens=pending[1], stalled_s=stalled_s[1])
    if pending[0] == pending[1]:  # a tie may go to the first ring
        return

    assert choose("dualmap", a, b) == choose("dualmap", b, a)
