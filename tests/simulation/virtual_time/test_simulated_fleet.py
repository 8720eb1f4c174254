from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Weights
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import Placement
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import at_once
from dualmap.simulation.virtual_time.simulated_fleet import SimulatedFleet
from dualmap.simulation.virtual_time.simulated_pool import SimulatedPool

SETTINGS = SchedulingSettings()
CHAIN = Chain((1, 2, 3, 4), 128, 512)


def fleet(engine_queues: dict[str, int] | None = None) -> SimulatedFleet:
    pool = SimulatedPool(SETTINGS, lambda: 1000)
    for instance_id in ("a", "b"):
        pool.put_instance(InstanceSpec(instance_id, f"http://{instance_id}", state=InstanceState.READY))
    return SimulatedFleet(pool, engine_queues)


def placement(request_id: str = "1") -> Placement:
    request = StoredRequest(
        request_id,
        "r",
        "",
        RequestState.HELD,
        1,
        uncached_tokens=0,
        prompt_tokens=512,
        expected_output_tokens=256,
        slo_ms=5000,
    )
    return Placement(request, CHAIN, Weighing(Leg.WHOLE, ("a", "b"), Weights(PLAIN_TTFT, PLAIN_TTFT)))


def test_the_view_follows_members_and_hot_prefixes_at_once() -> None:
    made = fleet()
    before = made.view
    assert made.view is before, "built once"

    made.pool.set_instance_state("b", InstanceState.DRAINING)

    assert before.ready == ("a", "b")
    assert made.view.ready == ("a",)


def test_where_engines_queue_their_own_requests_the_policies_see_those_queues() -> None:
    waiting = {"a": 1, "b": 0}
    made = fleet(waiting)
    at_once(made.place(placement()))

    loads = at_once(made.observe(("a", "b"), CHAIN)).loads

    assert (loads["a"].queued_requests, loads["a"].running_requests) == (1, 0)
    assert (loads["b"].queued_requests, loads["b"].running_requests) == (0, 0)
    in_fleet = at_once(made.pool.store.observe(("a",), CHAIN)).loads["a"]
    assert (in_fleet.queued_requests, in_fleet.running_requests) == (0, 1)
