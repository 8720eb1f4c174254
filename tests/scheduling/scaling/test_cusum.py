"""A surplus of work: kept while more arrives than the reference, forgotten when it was one burst."""

from __future__ import annotations

from dualmap.scheduling.scaling.cusum import MIN_MEAN_S, TROUGH_S, Cusum


def test_it_grows_by_what_exceeds_the_reference_and_ends_at_zero() -> None:
    cusum = Cusum()
    for second in range(10):
        cusum.add(second, 1.0, 5.0, reference=3.0)
    assert cusum.excess_s == 20.0
    assert cusum.load == 5.0
    for second in range(10, 20):
        cusum.add(second, 1.0, 1.0, reference=3.0)
    assert (cusum.excess_s, cusum.work_s, cusum.elapsed_s) == (0.0, 0.0, 0.0)


def test_a_burst_of_a_second_is_no_load_of_its_own() -> None:
    cusum = Cusum()
    cusum.add(0, 1.0, 30.0, reference=3.0)
    assert cusum.load == 30.0 / MIN_MEAN_S


def test_its_trough_is_the_least_of_the_last_looks_and_zero_before_they_last() -> None:
    cusum = Cusum()
    for second, work_s in enumerate([13.0, 1.0, 8.0, 3.0, 3.0]):
        cusum.add(second, 1.0, work_s, reference=3.0)
        if second < TROUGH_S - 1:
            assert cusum.trough_s(second) == 0.0
    assert cusum.trough_s(4) == 8.0
