from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.estimates.ttft import expected_ttft_s, queueing_s
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.view import ClusterView

Choose = Callable[..., Decision]
Load = Callable[..., InstanceLoad]
Query = Callable[..., RouteQuery]


def test_the_larger_hit_is_taken_while_it_meets_the_slo(choose: Choose, load: Load) -> None:
    # given 4.5 s of queueing and 0.5 s of computing where the hit is: exactly the SLO
    cached = load("cached", hit_blocks=5, pending_tokens=4500)

    decision = choose("dualmap", load("idle"), cached)

    assert (decision.instance_id, decision.reason) == ("cached", Reason.CACHE)
    assert (decision.hit_blocks, decision.expected_ttft_s) == (5, 5.0)


def test_past_the_slo_the_less_loaded_one_is_taken(choose: Choose, load: Load) -> None:
    cached = load("cached", hit_blocks=5, pending_tokens=4501)

    decision = choose("dualmap", cached, load("idle"))

    assert (decision.instance_id, decision.reason) == ("idle", Reason.SLO)
    assert decision.alternative_id == "cached"


def test_a_smaller_ttft_elsewhere_is_not_chased(choose: Choose, load: Load) -> None:
    # given an idle candidate that would answer in 1 s, and a hit that answers in 4 s
    decision = choose("dualmap", load("cached", hit_blocks=1, pending_tokens=3100), load("idle"))

    assert decision.instance_id == "cached"


def test_equal_hits_go_to_the_less_loaded_whatever_the_instances_rates(choose: Choose, load: Load) -> None:
    fast = load("fast", hit_blocks=3, pending_tokens=24, prefill_tokens_per_s=1200.0)

    decision = choose("dualmap", fast, load("b", hit_blocks=3, pending_tokens=10))

    assert (decision.instance_id, decision.reason) == ("b", Reason.BALANCE)


def test_without_queued_work_the_one_with_less_kv_memory_in_use_is_less_loaded(choose: Choose, load: Load) -> None:
    assert choose("dualmap", load("a", context_tokens=9000), load("b", context_tokens=100)).instance_id == "b"


def test_load_is_time_so_a_faster_instance_carries_more(choose: Choose, load: Load) -> None:
    fast = load("fast", pending_tokens=3000, prefill_tokens_per_s=4000.0)

    assert choose("dualmap", load("slow", pending_tokens=1000), fast).instance_id == "fast"


def test_both_past_the_slo_goes_to_the_less_loaded(choose: Choose, load: Load) -> None:
    loads = load("a", hit_blocks=2, pending_tokens=9000), load("b", pending_tokens=8000)

    decision = choose("dualmap", *loads)

    assert (decision.instance_id, decision.reason) == ("b", Reason.BOTH_OVERLOADED)


def test_a_decode_bottleneck_is_left_to_the_rebalancer(choose: Choose, load: Load) -> None:
    # given 0.5 s of computing behind 1 s of queue on an instance that has finished nothing for 4 s
    stalled = load("stalled", hit_blocks=5, pending_tokens=1000, stalled_s=4.0)

    assert choose("dualmap", stalled, load("idle")).instance_id == "stalled"


def test_the_slo_is_the_request_s_own(choose: Choose, load: Load, query: Query) -> None:
    loads = load("cached", hit_blocks=5, pending_tokens=1500), load("idle")

    assert choose("dualmap", *loads, ask=query(slo_s=2.0)).instance_id == "cached"
    assert choose("dualmap", *loads, ask=query(slo_s=1.9)).instance_id == "idle"


def the_papers_choice(query: RouteQuery, first: InstanceLoad, second: InstanceLoad) -> str:
    """The rule as DualMap (ICLR 2026) states it."""

    first, second = (replace(load, stalled_s=0.0) for load in (first, second))

    def on_time(load: InstanceLoad) -> bool:
        return expected_ttft_s(load, query.chain.uncached_tokens(load.hit_blocks)) <= query.slo_s

    loads = (queueing_s(first), first.context_tokens), (queueing_s(second), second.context_tokens)
    lighter = second if loads[1] < loads[0] else first
    if first.hit_blocks == second.hit_blocks:
        return lighter.instance_id
    cached = first if first.hit_blocks > second.hit_blocks else second
    return cached.instance_id if on_time(cached) else lighter.instance_id


candidates = st.tuples(
    st.integers(0, 9),
    st.integers(0, 240).map(lambda number: 50 * number),
    st.integers(0, 15).map(lambda number: 100_000 * number),
    st.sampled_from((0.0, 2.9, 3.0, 6.0)),
)
"""Hit blocks, pending and context tokens, and time without a first token: loads that differ by no less than a full KV
memory weighs, which is two milliseconds of queueing."""


@given(candidates, candidates, st.sampled_from((0.5, 2.0, 5.0)), st.sampled_from((300.0, 1000.0, 8000.0)))
def test_the_weights_are_the_papers_rule(
    choose: Choose,
    load: Load,
    query: Query,
    one: tuple[int, int, int, float],
    other: tuple[int, int, int, float],
    slo_s: float,
    rate: float,
) -> None:
    names = ("hit_blocks", "pending_tokens", "context_tokens", "stalled_s")
    loads = [
        load(name, **dict(zip(names, figures, strict=True)), prefill_tokens_per_s=rate)
        for name, figures in (("a", one), ("b", other))
    ]
    ask = query(slo_s=slo_s)

    assert choose("dualmap", *loads, ask=ask).instance_id == the_papers_choice(ask, *loads)


@given(candidates, candidates, st.tuples(*[st.sampled_from((500.0, 1000.0, 3000.0, 9000.0))] * 2))
def test_with_rates_of_their_own_the_weights_differ_only_to_meet_an_slo(
    choose: Choose,
    load: Load,
    query: Query,
    one: tuple[int, int, int, float],
    other: tuple[int, int, int, float],
    rates: tuple[float, float],
) -> None:
    names = ("hit_blocks", "pending_tokens", "context_tokens", "stalled_s")
    loads = {
        name: load(name, **dict(zip(names, figures, strict=True)), prefill_tokens_per_s=rate)
        for name, figures, rate in zip("ab", (one, other), rates, strict=True)
    }
    ask = query()

    def on_time(name: str) -> bool:
        return (
            expected_ttft_s(replace(loads[name], stalled_s=0.0), ask.chain.uncached_tokens(loads[name].hit_blocks))
            <= ask.slo_s
        )

    decision = choose("dualmap", *loads.values(), ask=ask)
    papers = the_papers_choice(ask, *loads.values())

    assert decision.instance_id == papers or (on_time(decision.instance_id) and not on_time(papers))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(2, 6)), min_size=1, max_size=200))
def test_requests_of_one_prefix_meet_at_most_two_instances(
    view: Callable[..., ClusterView],
    policy: Callable[..., Policy],
    choose: Choose,
    load: Load,
    arrivals: list[tuple[int, int]],
) -> None:
    # given requests of four prefixes, random lengths, loads that grow with every request
    cluster, dualmap = view([f"i{number}" for number in range(8)]), policy("dualmap")
    pending: dict[str, int] = {}
    met: dict[int, set[str]] = {}
    for prefix, length in arrivals:
        ask = RouteQuery(Chain(tuple(1000 * prefix + k for k in range(1, length + 1)), 100, 100 * length), slo_s=1.0)
        names = dualmap.candidates(ask, cluster)
        chosen = choose("dualmap", *(load(name, pending_tokens=pending.get(name, 0)) for name in names), ask=ask)
        pending[chosen.instance_id] = pending.get(chosen.instance_id, 0) + chosen.uncached_tokens
        met.setdefault(prefix, set()).add(chosen.instance_id)

    assert all(len(instances) <= 2 for instances in met.values())


@pytest.mark.parametrize(("name", "rebalances"), [("dualmap", True), ("dualmap-no-rebalance", False)])
def test_only_the_full_method_rebalances(policy: Callable[..., Policy], name: str, rebalances: bool) -> None:
    assert policy(name).rebalances is rebalances
