"""A simulated fleet that follows its engines' caches."""

from __future__ import annotations

from dataclasses import replace

from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Weights
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import Placement
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import at_once
from dualmap.simulation.engine.kv_pool import CacheChange
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.reported_caches import ReportedCaches
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.virtual_time.simulated_pool import SimulatedPool
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.sources import TraceSource

CHAIN = Chain((11, 12), 512, 1024)


class Followed:
    """An instance whose caches are followed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pool = SimulatedPool(SchedulingSettings(), lambda: round(1000 * self.now_s))
        self.pool.put_instance(InstanceSpec("a", "http://a", state=InstanceState.READY))
        self.reported = ReportedCaches(self.pool)
        self.reported.route((1, 2, 3), (11, 12))

    def apply(self, *journal: tuple[CacheChange, int]) -> int:
        """The hit of the chain after this."""
        self.reported.apply("a", [*journal], self.now_s)
        return at_once(self.pool.store.observe(("a",), CHAIN)).loads["a"].hit_blocks


def test_what_an_engine_reports_is_listed_under_the_routers_hashes() -> None:
    followed = Followed()
    hits = [
        followed.apply((CacheChange.STORED, 1), (CacheChange.STORED, 2), (CacheChange.REMOVED, 2)),
        followed.apply((CacheChange.STORED, 2)),
        followed.apply((CacheChange.CLEARED, 0)),
        followed.apply((CacheChange.STORED, 1), (CacheChange.CLEARED, 0), (CacheChange.STORED, 1)),
    ]
    assert hits == [1, 2, 0, 1]


def test_an_engine_that_began_again_is_followed_again() -> None:
    followed = Followed()
    followed.apply((CacheChange.STORED, 1))
    for state in (InstanceState.DOWN, InstanceState.READY):
        followed.pool.set_instance_state("a", state)

    assert followed.apply() == 0
    assert followed.apply((CacheChange.STORED, 1), (CacheChange.STORED, 2)) == 2


def test_bookings_that_are_never_reported_end() -> None:
    followed = Followed()
    request = StoredRequest(
        "r",
        "one",
        "",
        RequestState.HELD,
        1,
        uncached_tokens=0,
        prompt_tokens=1024,
        expected_output_tokens=10,
        slo_ms=5000,
    )
    followed.apply()
    at_once(
        followed.pool.store.place(
            Placement(request, CHAIN, Weighing(Leg.WHOLE, ("a",), Weights(PLAIN_TTFT, PLAIN_TTFT)))
        )
    )
    hits = []
    for followed.now_s in (1.0, 29.0, 30.0, 59.0, 60.0):
        hits.append(followed.apply())

    assert hits == [2, 2, 2, 2, 0]


def test_reports_make_the_expected_hits_come_true_where_caches_turn_over() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    small = replace(engine, kv_capacity_tokens=engine.kv_capacity_tokens // 4)

    for seed in (1, 2, 3):
        # Below overload: what waits for minutes meets another cache than it was placed by, whatever was known then. At
        # its own times: sessions that wait for their answers ask for what is still there, and caches hardly turn over.
        trace = TraceSource("agents", requests=150, seed=seed).load(0.15)
        estimate, events = (
            simulate(trace, Scenario(SchedulingSettings(), small, 4, kv_events=reported, loop=Loop(open=True)))
            for reported in (False, True)
        )

        assert abs(events.expected_hit_rate - events.hit_rate) < abs(estimate.expected_hit_rate - estimate.hit_rate)
        assert events.hit_rate > 0
