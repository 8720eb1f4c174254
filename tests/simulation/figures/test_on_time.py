from dataclasses import dataclass

import pytest

from dualmap.simulation.figures.on_time import OnTimeShares


@dataclass
class Request:
    input_tokens: int
    on_time: bool = True
    answered: bool = True
    tpot_s: float | None = 0.05


def test_long_prompts_that_are_late_weigh_by_their_tokens() -> None:
    shares = OnTimeShares.of([Request(100), Request(200), Request(300), Request(9400, on_time=False)])

    assert shares.by_requests == 0.75
    assert shares.by_prompt_tokens == pytest.approx(0.06)
    assert shares.by_length == (1.0, 1.0, 1.0, 0.0)


def test_quarters_are_by_length_and_as_even_as_the_number_allows() -> None:
    served = [Request(tokens, on_time=tokens > 2) for tokens in (6, 5, 4, 3, 2, 1)]

    assert OnTimeShares.of(served).by_length == (0.0, 0.5, 1.0, 1.0)


def test_a_slow_answer_meets_one_slo_only_and_one_token_is_never_slow() -> None:
    shares = OnTimeShares.of([Request(1, tpot_s=0.1), Request(1, tpot_s=0.11), Request(1, tpot_s=None)])

    assert (shares.by_requests, shares.both_slos) == (1.0, pytest.approx(2 / 3))
    assert shares.both_tight == pytest.approx(1 / 3), "50 ms"


def test_refused_requests_are_late_and_counted_by_length() -> None:
    refused = Request(1000, on_time=False, answered=False, tpot_s=None)

    shares = OnTimeShares.of([Request(1), Request(2), Request(3), refused])

    assert (shares.refused, shares.refused_by_length, shares.both_slos) == (0.25, (0.0, 0.0, 0.0, 1.0), 0.75)


def test_nothing_served_is_nothing_on_time() -> None:
    assert OnTimeShares.of([]).by_requests == 0.0
