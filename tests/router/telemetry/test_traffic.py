"""A heartbeat carries the counts of a replica's traffic."""

from __future__ import annotations

from dataclasses import replace

from dualmap.router.telemetry.metrics import TPOT_BOUNDS_S, WAIT_BOUNDS_S, RouterMetrics
from dualmap.router.telemetry.traffic import INFO_FIELD, PROCESS_FIELD, FleetTraffic, TrafficCounts
from dualmap.scheduling.request.outcome import Outcome
from dualmap.statestore.leases import ReplicaInfo


def beat(replica_id: str, counts: TrafficCounts) -> ReplicaInfo:
    return ReplicaInfo(replica_id, 1, 1, {INFO_FIELD: counts.to_text()})


def test_counts_survive_the_heartbeat() -> None:
    metrics = RouterMetrics(["default"]).pools["default"]
    metrics.outcomes[Outcome.COMPLETED].inc(3)
    metrics.outcomes[Outcome.REFUSED].inc()
    metrics.outcomes[Outcome.TIMED_OUT].inc(2)
    metrics.arrived.inc(7)
    metrics.limited.inc()
    for _ in range(4):
        metrics.count_on_time(True, None)
    metrics.count_on_time(False, Outcome.REFUSED)
    metrics.prompt_tokens_unreported.inc(100)
    metrics.hit_tokens_unreported.inc(40)
    metrics.count_ttft(0.3, None)
    metrics.count_ttft(0.4, None)
    metrics.count_answer(2.3, 0.3, 101)

    counts = TrafficCounts.of(metrics)

    sums = replace(counts, ttft_buckets=(), tpot_buckets=())
    assert sums == TrafficCounts(
        6,
        2,
        1,
        on_time=4,
        late=1,
        prompt_tokens=100,
        hit_tokens=40,
        output_tokens=101,
        arrived=7,
        answered=3,
        limited=1,
    )
    assert dict(zip(WAIT_BOUNDS_S, counts.ttft_buckets, strict=False))[0.5] == sum(counts.ttft_buckets) == 2
    assert dict(zip(TPOT_BOUNDS_S, counts.tpot_buckets, strict=False))[0.02] == sum(counts.tpot_buckets) == 1
    assert TrafficCounts.from_info({INFO_FIELD: counts.to_text()}) == counts


def test_answers_without_a_report_count_as_expected_beside_those_with_one() -> None:
    metrics = RouterMetrics(["default"]).pools["default"]
    metrics.prompt_tokens_unreported.inc(100)
    metrics.hit_tokens_unreported.inc(40)
    before = TrafficCounts.of(metrics)
    metrics.prompt_tokens_reported.inc(90)
    metrics.hit_tokens_reported.inc(30)

    counts = TrafficCounts.of(metrics)

    assert (counts.prompt_tokens, counts.hit_tokens) == (190, 70)
    assert not counts.falls_short_of(before), "or the page would take it for a repeated heartbeat"


def test_what_another_version_wrote_is_read_as_far_as_it_is_understood() -> None:
    assert TrafficCounts.from_info({}) == TrafficCounts()
    assert TrafficCounts.from_info({INFO_FIELD: "ended=4 new=7 late=x ="}) == TrafficCounts(ended=4)
    assert TrafficCounts.from_info({INFO_FIELD: "ended=1,2 ttft_buckets=1,2,3 tpot_buckets=4"}) == TrafficCounts()


def test_buckets_add_up_over_replicas_and_restarts() -> None:
    none, some, more = (TrafficCounts(ttft_buckets=(count,) * 18) for count in (0, 2, 5))

    assert TrafficCounts().plus(some).plus(some).ttft_buckets == (4,) * 18
    assert more.since(some).ttft_buckets == (3,) * 18
    assert some.since(TrafficCounts()) == some
    assert some.since(more) == some, "a process that began again"
    assert TrafficCounts().since(none).ttft_buckets == (0,) * 18


def test_a_replica_that_begins_again_or_leaves_takes_nothing_from_the_sums() -> None:
    fleet = FleetTraffic()
    fleet.read([beat("one", TrafficCounts(ended=5)), beat("two", TrafficCounts(ended=1))])

    assert fleet.read([beat("one", TrafficCounts(ended=2))]).ended == 8
    assert fleet.read([beat("one", TrafficCounts(ended=3)), beat("two", TrafficCounts(ended=4))]).ended == 12


def test_a_heartbeat_that_a_hand_over_repeats_is_not_counted_twice() -> None:
    def beat_of(process: str, ended: int) -> ReplicaInfo:
        traffic = TrafficCounts(ended=ended, failed=ended).to_text()
        return ReplicaInfo("one", 1, 1, {INFO_FIELD: traffic, PROCESS_FIELD: process})

    fleet = FleetTraffic()
    totals = [fleet.read([beat_of("a", ended)]).failed for ended in (5, 12, 5, 14)]

    assert totals == [5, 12, 12, 14]
    assert fleet.read([beat_of("b", 3)]).failed == 17, "the replica was restarted"
