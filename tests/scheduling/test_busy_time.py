"""How long an engine was busy, by its first tokens."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

import pytest

from scheduling.busy_time import MOST_STEPS, BusyTime, PrefillSample

STEP_TOKENS = 2048.0


def sample(tokens: int, dispatched_ms: int, first_token_ms: int, previous_ms: int = 0) -> PrefillSample:
    return PrefillSample(tokens, 0, 10_000, dispatched_ms, first_token_ms, previous_ms)


def together(samples: list[PrefillSample]) -> BusyTime:
    for former, later in pairwise(samples):
        assert BusyTime.of(former).continues_in(later, STEP_TOKENS)
    return reduce(BusyTime.with_next, [BusyTime.of(one) for one in samples])


def test_a_prefill_alone_takes_from_its_dispatch_to_its_first_token() -> None:
    busy = BusyTime.of(sample(1000, dispatched_ms=5000, first_token_ms=5200, previous_ms=900))

    assert (busy.busy_s, busy.tokens, busy.ends) == (0.2, 1000, 1)


def test_a_prefill_behind_another_takes_from_the_others_end() -> None:
    busy = BusyTime.of(sample(1000, dispatched_ms=5000, first_token_ms=5900, previous_ms=5700))

    assert busy.busy_s == pytest.approx(0.2)


def test_prefills_that_one_step_computed_are_one_end_and_one_time() -> None:
    busy = together([sample(300, 1000, 1100), sample(500, 1000, 1101, 1100), sample(200, 1010, 1103, 1101)])

    assert (busy.tokens, busy.ends, busy.busy_s) == (1000, 1, pytest.approx(0.103))
    assert busy.context_tokens == 1000 * 10_000


def test_prefills_without_a_gap_are_taken_together() -> None:
    busy = together([sample(3000, 1000, 1400), sample(5000, 1100, 2000, 1400)])

    assert (busy.tokens, busy.ends, busy.busy_s) == (8000, 2, pytest.approx(1.0))


@pytest.mark.parametrize(
    "later",
    [
        sample(100, dispatched_ms=1500, first_token_ms=1600, previous_ms=1400),
        sample(100, dispatched_ms=1300, first_token_ms=1600, previous_ms=1450),
    ],
    ids=["after a gap", "after a first token that nobody told of"],
)
def test_what_does_not_follow_begins_anew(later: PrefillSample) -> None:
    assert not BusyTime.of(sample(3000, 1000, 1400)).continues_in(later, STEP_TOKENS)
    assert not BusyTime().continues_in(later, STEP_TOKENS)


def test_only_so_much_is_taken_together_but_never_half_a_step() -> None:
    long = BusyTime.of(sample(MOST_STEPS * 2048, 0, 2000))

    assert not long.continues_in(sample(100, 1000, 2100, 2000), STEP_TOKENS)
    assert long.continues_in(sample(100, 1000, 2004, 2000), STEP_TOKENS)


def test_a_clock_that_stepped_back_took_no_time() -> None:
    assert BusyTime.of(sample(100, dispatched_ms=2000, first_token_ms=1000)).busy_s == 0.0


def test_a_busy_time_survives_as_floats() -> None:
    busy = together([sample(3000, 1000, 1400), sample(5000, 1100, 2000, 1400)])

    assert BusyTime.from_floats(busy.floats()) == busy
