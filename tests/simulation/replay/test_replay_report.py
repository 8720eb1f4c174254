"""Figures of a replay."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from rich.console import Console

from dualmap.simulation.figures.results import LoadSample
from dualmap.simulation.replay.replay_report import (
    CachedError,
    ReplayedRequest,
    ReplayRecord,
    record_lines,
    report_rows,
    report_tables,
    summarize_replay,
)


def answered(
    index: int, ttft_s: float, instance_id: str = "i-1", cached_tokens: int = 0, expected_ttft_s: float | None = None
) -> ReplayedRequest:
    return ReplayedRequest(
        index=index, arrival_s=float(index), lag_s=0.0, input_tokens=100, slo_s=5.0, instance_id=instance_id,
        ttft_s=ttft_s, e2e_s=ttft_s + 1.0, prompt_tokens=100, completion_tokens=11, cached_tokens=cached_tokens,
        expected_ttft_s=expected_ttft_s,
    )  # fmt: skip


def failed(index: int, failure: str) -> ReplayedRequest:
    return ReplayedRequest(index=index, arrival_s=float(index), lag_s=0.0, input_tokens=100, slo_s=5.0, failure=failure)


RECORD = ReplayRecord(
    trace="made",
    url="http://x",
    rate_per_s=1.0,
    time_scale=1.0,
    slo_ttft_s=5.0,
    skip_requests=1,
    requests=(
        answered(0, 99.0),
        answered(1, 1.0, cached_tokens=50),
        answered(2, 5.0, "i-2", cached_tokens=90),
        answered(3, 5.1),
        failed(4, "status 503"),
    ),
    unsent=2,
    samples=(LoadSample(0.0, (0, 0), 0, 0), LoadSample(1.0, (5000, 15000), 0, 0)),
    migrations=3,
)


def test_a_request_is_on_time_by_its_own_slo() -> None:
    patient = replace(RECORD.requests[3], slo_s=6.0)

    report = summarize_replay(replace(RECORD, requests=(*RECORD.requests[:3], patient, RECORD.requests[4])))

    assert (report.effective_capacity, report.own_slos) == (3 / 4, 1)
    assert report_rows(report)[2] == ("TTFT within the request's SLO (5 s, its own, or by length)", "75.0%")


def test_a_request_counts_where_it_meets_both_slos() -> None:
    quick, slow = (replace(answered(index, 1.0), e2e_s=1.0 + 10 * tpot_s) for index, tpot_s in ((1, 0.04), (2, 0.06)))
    single = replace(answered(3, 1.0), completion_tokens=1, e2e_s=1.0)
    late = replace(answered(4, 6.0), e2e_s=6.0)
    requests = (quick, slow, single, late, failed(5, "timeout"))

    report = summarize_replay(replace(RECORD, skip_requests=0, requests=requests, slo_tpot_s=0.05))

    assert (report.effective_capacity, report.both_slos, report.slo_tpot_s) == (3 / 5, 2 / 5, 0.05)
    assert ("and 50 ms per output token", "40.0%") in report_rows(report)


def test_failed_requests_are_not_on_time_and_skipped_ones_are_only_counted() -> None:
    report = summarize_replay(RECORD)
    assert (report.sent, report.answered, report.failed, report.unsent, report.skipped) == (5, 4, 1, 2, 1)
    assert report.effective_capacity == 2 / 4
    assert report.hit_rate == pytest.approx(140 / 300)
    assert report.ttft_s.p50 == 5.0
    assert report.tpot_s.p50 == pytest.approx(0.1)
    assert report.load_cv == pytest.approx(0.5)  # an idle fleet says nothing of its balance
    assert {name: share.requests for name, share in report.instances.items()} == {"i-1": 2, "i-2": 1}
    assert report.span_s == pytest.approx(3 + 6.1)
    assert report.failures == {"status 503": 1}


def test_the_estimate_is_judged_by_the_requests_that_tell_it() -> None:
    requests = (
        answered(0, 1.0, expected_ttft_s=9.0),  # left out, as are all its figures
        answered(1, 2.0, expected_ttft_s=1.0),
        answered(2, 1.0, expected_ttft_s=1.1),
        answered(3, 4.0, expected_ttft_s=3.2),
        answered(4, 1.0),
        failed(5, "timeout"),
    )
    report = summarize_replay(replace(RECORD, requests=requests))
    assert report.ttft_error_s is not None
    assert (report.ttft_error_p50, report.ttft_error_s.p50) == pytest.approx((0.2, 0.8))
    assert report.ttft_error_p90 == pytest.approx(0.44)
    assert dict(report_rows(report))["TTFT estimate's error P50 / P90"] == "20% / 44%, 0.80 / 0.96 s"
    assert orjson.loads(report.to_json())["ttft_error_s"]["p90"] == pytest.approx(0.96)


def test_the_report_goes_to_json_and_to_a_table() -> None:
    report = summarize_replay(RECORD)
    loaded = orjson.loads(report.to_json())
    assert loaded["effective_capacity"] == 0.5
    assert loaded["instances"]["i-2"]["hit_rate"] == 0.9
    rows = dict(report_rows(report))
    assert rows["sent / answered / failed"] == "5 / 4 / 1"
    assert rows["failed: status 503"] == "1"
    assert rows["not sent (stopped)"] == "2"
    console = Console(width=120, record=True, quiet=True)
    with console.capture():
        console.print(*report_tables(report))
    assert len(record_lines(RECORD.requests).splitlines()) == 5


def test_nothing_answered_gives_a_report_of_nothing() -> None:
    report = summarize_replay(
        ReplayRecord(
            trace="made",
            url="http://x",
            rate_per_s=1.0,
            time_scale=1.0,
            slo_ttft_s=5.0,
            skip_requests=0,
            requests=(failed(0, "timeout"),),
            unsent=0,
            samples=(),
            migrations=None,
        )
    )
    assert (report.effective_capacity, report.hit_rate, report.load_cv, report.migrations) == (0.0, None, None, None)
    assert (report.ttft_error_p50, report.ttft_error_p90, report.ttft_error_s) == (None, None, None)
    rows = dict(report_rows(report))
    assert (rows["migrations"], rows["TTFT estimate's error P50 / P90"]) == ("not observed", "not reported")


def test_a_hit_rate_that_nobody_tells_is_no_hit_rate_of_zero() -> None:
    silent = replace(answered(1, 1.0, "silent"), cached_tokens=None)

    report = summarize_replay(replace(RECORD, requests=(silent,)))
    assert report.hit_rate is None
    assert dict(report_rows(report))["hit rate"] == "not reported"
    # vLLM leaves the figure out where there was no hit
    report = summarize_replay(replace(RECORD, requests=(silent, answered(2, 1.0, cached_tokens=50))))
    assert report.hit_rate == pytest.approx(50 / 200)
    assert {name: share.hit_rate for name, share in report.instances.items()} == {"i-1": 0.5, "silent": None}


def test_the_estimate_is_not_blamed_for_the_clients_lag() -> None:
    late = replace(answered(1, 3.5, expected_ttft_s=1.0), lag_s=2.5)

    report = summarize_replay(replace(RECORD, requests=(late,)))
    assert report.ttft_s.p50 == 3.5
    assert report.ttft_error_p50 == pytest.approx(0.0)


def test_expected_cached_tokens_are_compared_with_reported_ones() -> None:
    requests = (
        replace(answered(1, 1.0, cached_tokens=500), expected_cached_tokens=510),
        replace(answered(2, 1.0, cached_tokens=500), expected_cached_tokens=400),
        replace(answered(3, 1.0), cached_tokens=None, expected_cached_tokens=600),
        answered(4, 1.0, cached_tokens=7),
    )

    report = summarize_replay(replace(RECORD, requests=requests))

    assert report.cached_error == CachedError((10 + 100 + 600) / 3, 1 / 3, 2 / 3)
    assert ("cached tokens' error mean, within 16 / 128", "237 tokens, 33.3% / 66.7%") in report_rows(report)


def test_cached_tokens_that_nobody_expects_or_reports_are_not_compared() -> None:
    silent = replace(answered(1, 1.0), cached_tokens=None, expected_cached_tokens=600)

    assert summarize_replay(replace(RECORD, requests=(silent,))).cached_error is None
    assert summarize_replay(RECORD).cached_error is None
