"""When a prefill is expected to be done."""

from __future__ import annotations

from router.timers import prefill_delay_s


def test_those_ahead_are_prefilled_first() -> None:
    assert prefill_delay_s(3000, 1000, 2000.0) == 2.0


def test_a_rate_of_nothing_does_not_divide() -> None:
    assert prefill_delay_s(0, 10, 0.0) == 10.0
