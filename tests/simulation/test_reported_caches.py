"""A simulated fleet that follows its engines' caches."""

from __future__ import annotations

from dataclasses import replace

from scheduling.instance import InstanceSpec
from scheduling.settings import SchedulingSettings
from simulation.kv_pool import CacheChange
from simulation.presets import find_preset
from simulation.reported_caches import ReportedCaches
from simulation.scenario import Scenario
from simulation.simulate import simulate
from simulation.sources import TraceSource
from statestore.memory.instance import InstanceBook


def test_what_an_engine_reports_is_listed_under_the_routers_hashes() -> None:
    book = InstanceBook(InstanceSpec("a", "http://a"))
    reported = ReportedCaches({"a": book})
    reported.route((1, 2, 3), (11, 12))

    reported.apply("a", [(CacheChange.STORED, 1), (CacheChange.STORED, 2), (CacheChange.REMOVED, 2)], 0.0)
    once = book.kv.hit_blocks((11, 12))
    reported.apply("a", [(CacheChange.CLEARED, 0)], 1.0)

    assert (once, book.kv.hit_blocks((11, 12))) == (1, 0)


def test_bookings_that_are_never_reported_end() -> None:
    book = InstanceBook(InstanceSpec("a", "http://a"))
    reported = ReportedCaches({"a": book})
    book.kv.stamp((11, 12), 2, 100)
    hits = []
    for now_s in (0.0, 29.0, 30.0, 59.0, 60.0):
        reported.apply("a", [], now_s)
        hits.append(book.kv.hit_blocks((11, 12)))

    assert hits == [2, 2, 0, 0, 0]


def test_reports_make_the_expected_hits_come_true_where_caches_turn_over() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    small = replace(engine, kv_capacity_tokens=engine.kv_capacity_tokens // 4)
    trace = TraceSource("agents", requests=150, seed=1).load(0.4)

    estimate, events = (
        simulate(trace, Scenario(SchedulingSettings(), small, 4, kv_events=reported)) for reported in (False, True)
    )

    assert abs(events.expected_hit_rate - events.hit_rate) <= abs(estimate.expected_hit_rate - estimate.hit_rate)
    assert events.hit_rate > 0
