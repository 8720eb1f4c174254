from dataclasses import replace

import pytest

from dualmap.simulation.figures.results import (
    LoadSample,
    Percentiles,
    RequestOutcome,
    RunRecord,
    summarize,
    undisturbed,
)


def outcome(arrival_s: float, ttft_s: float | None, e2e_s: float | None, **more: int | str) -> RequestOutcome:
    made = RequestOutcome(arrival_s, input_tokens=1000, output_tokens=11, slo_s=5.0, expected_ttft_s=1.0)
    made.first_token_s = None if ttft_s is None else arrival_s + ttft_s
    made.finish_s = None if e2e_s is None else arrival_s + e2e_s
    for name, value in more.items():
        setattr(made, name, value)
    return made


def record(*outcomes: RequestOutcome, **changes: object) -> RunRecord:
    made = RunRecord(
        policy="dualmap",
        trace="t",
        instances=2,
        rate_per_s=1.0,
        outcomes=outcomes,
        samples=(),
        infinite_cached_tokens=[500] * len(outcomes),
        migrations=0,
        preemptions=0,
        skip_requests=0,
    )
    return replace(made, **changes)


def test_effective_capacity_counts_refused_requests_as_late() -> None:
    result = summarize(record(outcome(0, 5.0, 6.0), outcome(1, 5.1, 9.0), outcome(2, None, None)))

    assert result.effective_capacity == pytest.approx(1 / 3)
    assert (result.requests, result.refused) == (3, 1)


def test_times_are_measured_from_the_arrival() -> None:
    result = summarize(record(outcome(100, 2.0, 4.0)))

    assert result.ttft_s.p50 == pytest.approx(2.0)
    assert result.e2e_s.p99 == pytest.approx(4.0)
    assert result.tpot_s.mean == pytest.approx(0.2)
    assert result.ttft_error_p50 == pytest.approx(0.5)


def test_hit_rates_are_by_tokens_and_beside_their_bound() -> None:
    result = summarize(record(outcome(0, 1, 2, cached_tokens=400), outcome(1, 1, 2, cached_tokens=0)))

    assert result.hit_rate == pytest.approx(0.2)
    assert result.infinite_hit_rate == pytest.approx(0.5)
    assert result.hit_share_of_bound == pytest.approx(0.4)


def test_the_bound_of_the_hit_rate_is_that_of_the_answered_requests() -> None:
    """Those that found most were answered, so that a bound over all of them would be below the hit rate."""
    answered, refused = outcome(0, 1, 2, cached_tokens=800), outcome(1, None, None)

    result = summarize(record(answered, refused, infinite_cached_tokens=[900, 0]))

    assert (result.hit_rate, result.infinite_hit_rate) == (pytest.approx(0.8), pytest.approx(0.9))


def test_skipped_requests_are_in_no_figure() -> None:
    result = summarize(record(outcome(0, 50.0, 60.0, key_blocks=9), outcome(1, 1, 2, key_blocks=2), skip_requests=1))

    assert result.effective_capacity == 1.0
    assert result.key_blocks == {2: 1}


def sample(time_s: float, *pending_tokens: int) -> LoadSample:
    return LoadSample(time_s, pending_tokens, held_requests=0, running_requests=0)


def test_load_deviation_is_averaged_over_moments_of_load() -> None:
    samples = sample(0, 0, 0), sample(1, 4000, 12000), sample(2, 5000, 5000), sample(3, 4000, 0)

    result = summarize(record(outcome(0, 1, 2), outcome(3, 1, 2), samples=samples))

    assert result.load_cv == pytest.approx(0.25), "2,000 tokens an instance are a single request's doing"


def test_neither_the_warm_up_nor_the_drain_counts_for_the_load() -> None:
    samples = [sample(time_s, 0, 9000) for time_s in (0, 1, 9, 10)] + [sample(5, 9000, 9000)]
    outcomes = outcome(0, 1, 2), outcome(2, 1, 2), outcome(8, 1, 2)

    result = summarize(record(*outcomes, samples=samples, skip_requests=1))

    assert [one.time_s for one in result.samples] == [5]
    assert result.load_cv == 0.0


def test_without_a_moment_of_load_there_is_no_deviation_to_tell() -> None:
    assert summarize(record(outcome(0, 1, 2), samples=[sample(0, 10, 0)])).load_cv is None


def test_percentiles_interpolate_and_survive_nothing() -> None:
    assert Percentiles.of([]) == Percentiles(0, 0, 0, 0)
    assert Percentiles.of([1, 2, 3]).p50 == 2
    assert Percentiles.of([0, 10]).p90 == pytest.approx(9)


def test_the_timeline_covers_all_arrivals() -> None:
    result = summarize(record(*(outcome(t, 1.0 if t < 50 else 9.0, 10) for t in range(100))))

    assert result.timeline[0][1] == 1.0
    assert result.timeline[-1][1] == 0.0
    assert len(result.timeline) == 60


def test_the_hold_ends_when_the_instance_gets_the_request() -> None:
    held, direct = outcome(10, 4.0, 6.0), outcome(11, 1.0, 2.0)
    held.dispatched_s, direct.dispatched_s = 12.5, 11.0

    result = summarize(record(held, direct))

    assert result.longest_hold_s == pytest.approx(2.5)


def test_the_error_of_the_estimate_is_told_in_seconds_too() -> None:
    result = summarize(record(outcome(0, 4.0, 6.0), outcome(1, 1.0, 2.0), outcome(2, 0.5, 2.0)))

    assert result.ttft_error_s.p50 == pytest.approx(0.5)


def on(instance_id: str, arrival_s: float, ttft_s: float, chosen_id: str | None = None) -> RequestOutcome:
    """Answered by this instance; another than the chosen one got it a second after its arrival."""
    made = outcome(arrival_s, ttft_s, ttft_s + 1, instance_id=instance_id, chosen_id=chosen_id or instance_id)
    made.dispatched_s = arrival_s + 1 if chosen_id else arrival_s
    return made


def test_who_comes_to_the_same_instance_before_the_first_token_disturbs() -> None:
    outcomes = [on("a", 0.0, 2.0), on("b", 0.5, 2.0), on("a", 1.9, 1.0), on("b", 2.6, 1.0), on("a", 2.9, 1.0)]

    assert undisturbed(outcomes) == [False, True, False, True, True], "one at the very first token disturbs, too"


def test_of_requests_that_arrive_together_the_last_is_undisturbed() -> None:
    assert undisturbed([on("a", 1.0, 2.0), on("a", 1.0, 2.0)]) == [False, True]


def test_a_moved_request_disturbs_both_instances_and_is_disturbed_itself() -> None:
    outcomes = [on("a", 0.0, 1.5), on("b", 0.0, 1.5), on("b", 0.1, 3.0, chosen_id="a"), on("b", 2.0, 1.0)]

    assert undisturbed(outcomes) == [False, False, False, True]


def test_a_request_that_its_queue_refused_disturbs_nobody_and_one_without_an_answer_is_not_counted() -> None:
    refused, given_up = outcome(0.5, None, None), outcome(9.0, None, None, chosen_id="a")

    assert undisturbed([on("a", 0.0, 2.0), refused, given_up]) == [True, False, False]


def test_the_error_over_the_undisturbed_stands_beside_the_error_over_all() -> None:
    outcomes = [on("a", 0.0, 4.0), on("a", 1.0, 4.0), on("b", 2.0, 1.25)]  # expected after a second

    result = summarize(record(*outcomes))

    assert result.undisturbed_share == pytest.approx(2 / 3)
    assert result.undisturbed_error_p50 == pytest.approx((0.75 + 0.2) / 2)
    assert result.ttft_error_p50 == pytest.approx(0.75)


def test_a_request_before_the_counted_ones_is_in_no_share() -> None:
    result = summarize(record(on("a", 0.0, 1.0), on("a", 0.5, 1.0), on("a", 1.2, 1.0), skip_requests=1))

    assert result.undisturbed_share == pytest.approx(0.5)


def test_with_nobody_undisturbed_there_is_no_error_to_tell() -> None:
    result = summarize(record(outcome(0, None, None)))

    assert (result.undisturbed_share, result.undisturbed_error_p50, result.undisturbed_error_p90) == (0.0, 0.0, 0.0)
