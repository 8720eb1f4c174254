"""Histograms that count many at once."""

from __future__ import annotations

import pytest

from dualmap.simulation.emulator.metrics import Histogram


def test_a_histogram_puts_values_into_the_first_bucket_that_holds_them() -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.1)
    histogram.observe(0.5, 3)
    histogram.observe(2.0)
    buckets, total = histogram.cumulative()
    assert buckets == [("0.1", 1), ("1.0", 4), ("+Inf", 5)]
    assert total == pytest.approx(3.6)
