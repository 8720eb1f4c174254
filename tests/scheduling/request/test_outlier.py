"""Which instances stand out from their peers."""

from __future__ import annotations

import pytest

from dualmap.scheduling.request.outlier import OutcomeWindow, OutlierRule, Tally, most_ejected, stands_out

RULE = OutlierRule(window_s=30.0)


@pytest.mark.parametrize(
    ("own", "peers", "expected"),
    [
        (Tally(0, 3), Tally(9, 0), True),
        (Tally(0, 2), Tally(9, 0), False),  # too few to show anything
        (Tally(7, 3), Tally(90, 0), True),
        (Tally(80, 20), Tally(300, 0), True),
        (Tally(95, 5), Tally(3000, 0), False),  # a small share never ejects
        (Tally(0, 50), Tally(0, 150), False),  # all fail alike: it is not the instance
        (Tally(5, 5), Tally(30, 30), False),
        (Tally(0, 5), Tally(0, 0), False),  # nobody to compare with
    ],
)
def test_an_instance_stands_out_by_its_share_beside_its_peers(own: Tally, peers: Tally, expected: bool) -> None:
    assert stands_out(own, peers, RULE) is expected


@pytest.mark.parametrize(("in_service", "most"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (10, 5)])
def test_no_more_than_half_of_a_pool_is_ejected_and_never_all(in_service: int, most: int) -> None:
    assert most_ejected(in_service, RULE) == most


def test_the_window_counts_each_instance_beside_all_others() -> None:
    window = OutcomeWindow(RULE)
    for fault in (True, False, True):
        window.add("a", fault=fault, now_s=1.0)
    window.add("b", fault=False, now_s=2.0)

    assert window.of("a", 2.0) == (Tally(1, 2), Tally(1, 0))
    assert window.of("b", 2.0) == (Tally(1, 0), Tally(1, 2))
    assert window.of("new", 2.0) == (Tally(), Tally(2, 2))


def test_outcomes_age_by_half_a_window_and_are_gone_after_a_whole_one() -> None:
    window = OutcomeWindow(RULE)
    window.add("a", fault=True, now_s=0.0)

    assert window.of("a", 20.0)[0] == Tally(0, 1)
    window.add("a", fault=False, now_s=21.0)
    assert window.of("a", 36.0)[0] == Tally(1, 0)
    assert window.of("a", 500.0) == (Tally(), Tally())


def test_what_is_forgotten_counts_for_nobody() -> None:
    window = OutcomeWindow(RULE)
    for instance_id, fault in (("a", True), ("b", False), ("c", True)):
        window.add(instance_id, fault=fault, now_s=0.0)
    window.add("a", fault=True, now_s=16.0)

    window.forget("a")
    assert window.of("a", 16.0) == (Tally(), Tally(1, 1))
    window.keep_only({"b": None})
    assert window.of("b", 16.0) == (Tally(1, 0), Tally())
