"""Instruments without locks, and what Prometheus reads from them."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as PrometheusHistogram

from dualmap.router.telemetry.instruments import Instruments


def exported(make: Instruments) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(make)
    return registry


def test_counters_and_gauges_are_exported_by_their_labels() -> None:
    make = Instruments()
    ended = make.counter("ended", "Ended", "pool", "how")
    live = make.gauge("live", "Live").labels()

    ended.labels("p", "well").inc()
    ended.labels("p", "well").inc(2)
    ended.labels("p", "badly").inc(0)
    live.inc(5)
    live.inc(-1)

    registry = exported(make)
    assert registry.get_sample_value("ended_total", {"pool": "p", "how": "well"}) == 3.0
    assert registry.get_sample_value("ended_total", {"pool": "p", "how": "badly"}) == 0.0
    assert registry.get_sample_value("live") == 4.0


def test_the_same_labels_give_the_same_instrument() -> None:
    family = Instruments().counter("ended", "Ended", "how")

    assert family.labels("well") is family.labels("well")
    assert family.labels("well") is not family.labels("badly")


def test_a_family_with_a_bound_drops_the_instrument_that_was_made_first() -> None:
    family = Instruments().counter("faults", "Faults", "instance", most=2)

    for instance_id in ("a", "b", "a", "c", "c"):
        family.labels(instance_id).inc()

    assert {values: each.value for values, each in family.instruments.items()} == {("b",): 1.0, ("c",): 2.0}


def test_labels_that_are_missing_are_refused_and_not_exported_wrong() -> None:
    with pytest.raises(ValueError, match="takes the labels"):
        Instruments().counter("ended", "Ended", "pool", "how").labels("p")


def test_a_histogram_is_exported_like_one_of_prometheus_client() -> None:
    values = [0.0, 0.05, 0.1, 0.1000001, 0.4, 2.0, 77.0]
    make, theirs = Instruments(), CollectorRegistry()
    reference = PrometheusHistogram("wait", "Wait", ["pool"], buckets=(0.1, 0.5, 2.0), registry=theirs)
    histogram = make.histogram("wait", "Wait", "pool", bounds=(0.1, 0.5, 2.0))

    for value in values:
        reference.labels("p").observe(value)
        histogram.labels("p").observe(value)

    def samples(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return [line for line in lines if "_created" not in line]

    assert samples(exported(make)) == samples(theirs)


def test_what_was_observed_is_counted_once_however_often_it_is_folded() -> None:
    make = Instruments()
    histogram = make.histogram("wait", "Wait", bounds=(0.5,)).labels()

    histogram.observe(0.25)
    make.fold()
    histogram.observe(1.0)
    make.fold()

    assert (list(histogram.counts), histogram.sum) == ([1, 1], 1.25)
    assert (list(histogram.counts), histogram.sum) == ([1, 1], 1.25)
