from collections.abc import Sequence
from math import inf

import pytest

from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.what_if.comparison import ALL, PARTS, Difference, Verdict, compare, figures


def served(
    ttfts_s: Sequence[float | None], tenant: str = "", priority: str = "", *, cached_tokens: int = 0
) -> list[RequestOutcome]:
    """One request a second, of which each got its first token after so long; None: it was refused."""
    return [
        RequestOutcome(
            float(second), 1000, 11, 1.0,
            first_token_s=None if ttft_s is None else second + ttft_s,
            finish_s=None if ttft_s is None else second + ttft_s + 0.5,
            tenant=tenant, priority=priority, cached_tokens=cached_tokens,
        )
        for second, ttft_s in enumerate(ttfts_s)
    ]  # fmt: skip


def of(differences: Sequence[Difference], figure: str, group: str = ALL) -> Difference:
    (found,) = [one for one in differences if one.figure.name == figure and one.group == group]
    return found


def test_a_run_against_itself_is_the_same_in_every_figure() -> None:
    run = served([0.1, 0.2, 0.4, 0.8, 1.6] * 40)

    differences = compare(run, run, figures(0.1))

    assert {one.verdict for one in differences} == {Verdict.SAME}
    assert all(one.now == one.then and one.half_width == 0 for one in differences)


def test_what_is_worse_in_every_part_is_worse() -> None:
    differences = compare(served([0.5] * 120), served([0.6, 1.2] * 60), figures())

    assert of(differences, "on time").now == 1.0
    assert of(differences, "on time").then == 0.5
    assert of(differences, "on time").verdict is of(differences, "TTFT P90").verdict is Verdict.WORSE
    assert of(differences, "time a token").verdict is Verdict.SAME


def test_what_is_better_is_better() -> None:
    differences = compare(served([0.6, 1.2] * 60), served([0.5] * 120, cached_tokens=500), figures())

    assert of(differences, "on time").verdict is of(differences, "TTFT P50").verdict is Verdict.BETTER
    assert of(differences, "found in cache").verdict is Verdict.BETTER


def test_one_bad_part_of_many_may_be_chance() -> None:
    bad = [0.5] * 110 + [2.0] * 10

    difference = of(compare(served([0.5] * 120), served(bad), figures()), "on time")

    assert difference.then == pytest.approx(110 / 120)
    assert difference.half_width > abs(difference.then - difference.now)
    assert difference.verdict is Verdict.SAME


def test_a_difference_that_is_certain_but_tiny_does_not_matter() -> None:
    difference = of(compare(served([0.5] * 120), served([0.505] * 120), figures()), "TTFT P50")

    assert difference.half_width == pytest.approx(0.0, abs=1e-9)
    assert difference.verdict is Verdict.SAME


def test_refused_requests_have_no_first_token_and_count() -> None:
    differences = compare(served([0.5] * 120), served([0.5, None, 0.5, 0.5] * 30), figures())

    assert of(differences, "refused").then == 0.25
    assert of(differences, "refused").verdict is of(differences, "on time").verdict is Verdict.WORSE
    assert of(differences, "TTFT P99").then == inf
    assert of(differences, "TTFT P99").verdict is Verdict.WORSE, "never is worse than any time"


def test_each_tenant_and_class_is_compared_where_there_are_several() -> None:
    now = sorted(
        served([0.5] * 120, "a", "high") + served([0.5] * 120, "b", "high"), key=lambda outcome: outcome.arrival_s
    )
    then = sorted(
        served([0.5] * 120, "a", "high") + served([2.0] * 120, "b", "high"), key=lambda outcome: outcome.arrival_s
    )

    differences = compare(now, then, figures())

    assert {one.group for one in differences} == {ALL, "tenant a", "tenant b"}, "one class is no group"
    assert of(differences, "on time", "tenant a").verdict is Verdict.SAME
    assert of(differences, "on time", "tenant b").verdict is Verdict.WORSE


def test_too_few_requests_give_no_confidence_and_no_verdict() -> None:
    differences = compare(served([0.5] * PARTS), served([2.0] * PARTS), figures())

    assert {one.half_width for one in differences} == {inf}
    assert {one.verdict for one in differences} == {Verdict.SAME}


def test_a_figure_that_no_request_has_is_left_out() -> None:
    one_token = served([0.5] * 120)
    for outcome in one_token:
        outcome.output_tokens = 1

    assert "time a token" not in {one.figure.name for one in compare(one_token, one_token, figures())}
