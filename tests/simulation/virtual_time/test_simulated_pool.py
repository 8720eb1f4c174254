"""The pool in virtual time: its copy of the members is never old, and nothing that its plans did is missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Weights
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import Placement, PlaceStatus
from dualmap.scheduling.queues.queue_order import DEFERRED_RANK_MS, PlanStep, QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import at_once
from dualmap.simulation.virtual_time.simulated_pool import REPLICA, SimulatedLed, SimulatedPool
from tests.statestore.samples import own_chain


@pytest.fixture
def pool() -> SimulatedPool:
    pool = SimulatedPool(SchedulingSettings(), lambda: 1000)
    pool.put_instance(InstanceSpec("a", "http://a", state=InstanceState.READY, dispatch_window_tokens=100))
    return pool


def place(pool: SimulatedPool, request_id: str) -> PlaceStatus:
    request = StoredRequest(
        request_id,
        REPLICA,
        "",
        RequestState.HELD,
        1,
        uncached_tokens=0,
        prompt_tokens=400,
        expected_output_tokens=50,
        slo_ms=5000,
    )
    placement = Placement(
        request, own_chain(request_id, 400), Weighing(Leg.WHOLE, ("a",), Weights(PLAIN_TTFT, PLAIN_TTFT))
    )
    return at_once(pool.store.place(placement)).status


def test_the_copy_of_the_members_follows_every_change(pool: SimulatedPool) -> None:
    before = pool.members
    assert pool.members is before, "read once"
    lease = at_once(pool.store.leader_lease.acquire("simulator", 60_000))
    assert lease is not None
    led = SimulatedLed(pool, lease.fence)

    pool.set_instance_state("a", InstanceState.DRAINING)
    assert pool.members.instances["a"].state is InstanceState.DRAINING
    pool.update_instance("a", {"max_running_requests": 7})
    assert pool.members.instances["a"].max_running_requests == 7
    at_once(led.publish_tree(HotnessTree({5: 2}), {5: 9}))
    assert pool.members.tree.hot == {5: 2}
    learned = replace(Learned(), answer_tokens=(77.0,) * len(Learned().answer_tokens))
    at_once(led.publish_learned(learned, {}))
    assert pool.members.learned == learned
    assert at_once(led.set_instance_state("a", InstanceState.STANDBY, expected=InstanceState.DRAINING))
    assert pool.members.instances["a"].state is InstanceState.STANDBY
    pool.put_instance(InstanceSpec("b", "http://b"))
    assert [*pool.members.instances] == ["a", "b"]
    assert pool.members == at_once(pool.store.membership())


def test_grants_are_taken_once_and_in_order(pool: SimulatedPool) -> None:
    assert [place(pool, name) for name in ("1", "2", "3")] == [PlaceStatus.DISPATCHED, *[PlaceStatus.HELD] * 2]
    assert [held.request_id for held in pool.held()] == ["2", "3"]
    queue = pool.release(Release("1", "a", seen=True))
    assert queue is not None

    at_once(pool.commit(QueuePlan("a", queue.load.version, (PlanStep("3"), PlanStep("2")), 0)))

    assert [grant.request_id for grant in pool.take_grants()] == ["3", "2"]
    assert pool.held() == []
    assert pool.take_grants() == []


def test_what_was_deferred_is_told_where_it_still_waits(pool: SimulatedPool) -> None:
    for name in ("1", "2", "3", "4"):
        place(pool, name)
    steps = tuple(PlanStep(name, DEFERRED_RANK_MS + 1) for name in ("2", "3"))
    queue = at_once(pool.store.queue_head("a"))
    assert queue is not None
    at_once(pool.commit(QueuePlan("a", queue.load.version, steps, 0)))
    pool.release(Release("2"))

    assert [request.request_id for request in pool.take_deferred()] == ["3"]
    assert pool.take_deferred() == ()
