"""Router replicas that share no store, each with a view of its own of the load."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from dualmap.research.unshared.load_view import LoadView
from dualmap.research.unshared.routers import UnsharedRouters
from dualmap.scheduling.settings import PolicyName, SchedulingSettings
from dualmap.scheduling.steps import at_once
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.errors import ScenarioError
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation, simulate
from dualmap.simulation.workload.generators import conversation
from dualmap.simulation.workload.traces import Trace, TraceRequest

ENGINE = find_preset("qwen2.5-7b-910b4").engine
CONVERSATION = conversation(requests=240, seed=1).capped(20_480)


def scenario(policy: PolicyName, view: LoadView | None, replicas: int = 4, **changes: object) -> Scenario:
    patient = SchedulingSettings(policy=policy, max_deferred_s=3600, max_hold_s=3600)
    routers = None if view is None else UnsharedRouters(replicas, view)
    return replace(Scenario(patient, ENGINE, instances=4, routers=routers), **changes)


def repeated(prefixes: int = 60, requests: int = 300) -> Trace:
    """Prompts with some long prefixes, each of which comes again five times."""
    rng, made = Random(1), []
    for number in range(requests):
        first, own = 100 * rng.randrange(prefixes), 100 * (prefixes + number)
        made.append(TraceRequest(number / 4, 6144, 20, (*range(first, first + 10), own, own + 1)))
    return Trace("repeated", 512, tuple(made))


def run(policy: PolicyName, view: LoadView | None, replicas: int = 4, **changes: object) -> RunResult:
    return simulate(repeated(), scenario(policy, view, replicas, **changes))


@pytest.mark.parametrize("policy", ["dualmap", "dualmap-least-cost", "llm-d"])
@pytest.mark.parametrize("view", LoadView)
def test_every_request_is_answered_and_nothing_is_left_in_any_books(policy: PolicyName, view: LoadView) -> None:
    simulation = Simulation(CONVERSATION.at_rate(4.0), scenario(policy, view))

    record = simulation.run()

    assert all(outcome.finish_s is not None for outcome in record.outcomes)
    assert len(simulation.replicas) == 4
    for replica in simulation.replicas:
        left = at_once(replica.pool.store.snapshot())
        assert left.requests == ()
        for load in left.loads.values():
            assert (load.pending_tokens, load.dispatched_tokens, load.context_tokens) == (0, 0, 0)
            assert (load.running_requests, load.queued_requests) == (0, 0)
        assert set(replica.waiting.values()) == {0}


def test_replicas_that_share_nothing_find_fewer_prefixes_and_a_pair_keeps_more_of_them() -> None:
    """The pair of a hash key is the same for every replica; what a full search finds depends on what it knows."""
    lost: dict[PolicyName, float] = {}
    policies: tuple[PolicyName, ...] = ("min-ttft", "dualmap")
    for policy in policies:
        one, eight = (run(policy, LoadView.OWN, replicas) for replicas in (1, 8))
        lost[policy] = 1 - eight.hit_rate / one.hit_rate

    assert lost["min-ttft"] > 0.2
    assert lost["dualmap"] < 0.1


def test_replicas_to_which_caches_are_reported_find_all_prefixes() -> None:
    shared, own, reported = (
        run("min-ttft", None),
        run("min-ttft", LoadView.OWN),
        run("min-ttft", LoadView.OWN, kv_events=True),
    )

    assert own.hit_rate < 0.9 * shared.hit_rate
    assert reported.hit_rate >= shared.hit_rate


def long_then_short(short: int) -> Trace:
    """Three long prompts, which keep three of four instances busy, then short ones at once; none shares a prefix."""
    made = [TraceRequest(0.0, 20_480, 4, tuple(range(40 * number, 40 * number + 40))) for number in range(3)]
    for number in range(short):
        first = 1000 + 8 * number
        made.append(TraceRequest(1.5, 4096, 4, tuple(range(first, first + 8))))
    return Trace("made", 512, tuple(made))


@pytest.mark.parametrize(
    ("view", "replicas", "herds"),
    [
        (LoadView.GAUGES, 1, True),
        (LoadView.LATE, 1, False),
        (LoadView.LATE, 15, True),
        (LoadView.EXACT, 15, False),
    ],
)
def test_a_full_search_by_old_loads_sends_a_burst_to_the_instance_that_was_idle(
    view: LoadView, replicas: int, herds: bool
) -> None:
    record = Simulation(long_then_short(12), scenario("min-ttft", view, replicas)).run()

    used = {outcome.instance_id for outcome in record.outcomes[3:]}
    assert (len(used) == 1) is herds


def test_what_needs_one_store_is_refused_without_it() -> None:
    with pytest.raises(ScenarioError, match="roles: only where router replicas share a store"):
        scenario("dualmap", LoadView.OWN, roles="2P2D")
