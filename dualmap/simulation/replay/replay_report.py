"""The figures of a live replay: one record for every request, and figures over all of them.

With emulated instances that run ``time_scale`` times faster than the clock, every time here is in engine seconds:
what the clock showed, times the scale. So reports of slow and of sped-up fleets can be compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import orjson
from rich.table import Table

from dualmap.simulation.figures.on_time import TPOT_SLO_S, meets_both
from dualmap.simulation.figures.results import LoadSample, Percentiles, answers_per_s, load_cv, span_s

UNKNOWN_INSTANCE = "unknown"
"""Instance id of an answer without the ``x-dualmap-instance`` header (a bare vLLM server, an error of the router)."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ReplayedRequest:
    """The outcome of one request. Times in engine seconds; None: it never got there."""

    index: int
    """The number of the request in the order of sending, from 0; at the trace's own times that is its place in the
    trace."""
    arrival_s: float
    """When it was due."""
    lag_s: float
    """How much later it was sent: a busy client, not the fleet."""
    input_tokens: int
    slo_s: float
    """The TTFT SLO that was sent along."""
    failure: str | None = None
    """Why there was no whole answer; None: it was answered."""
    instance_id: str = UNKNOWN_INSTANCE
    attempts: int = 1
    ttft_s: float | None = None
    """Time from when the request was due to the first content: a client that is behind makes no request faster."""
    expected_ttft_s: float | None = None
    """Estimate of the router when it placed the request; None: not reported."""
    e2e_s: float | None = None
    """Time from when the request was due to the end of its answer."""
    prompt_tokens: int = 0
    """Prompt tokens as the instance counted them; 0 if not reported."""
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """None: the instance did not report it; vLLM reports it for no request without a hit, and for none at all without
    ``--enable-prompt-tokens-details``."""
    expected_cached_tokens: int | None = None
    """Cached tokens that the router expected; None: not reported."""

    @property
    def answered(self) -> bool:
        return self.failure is None

    @property
    def on_time(self) -> bool:
        """Whether it was answered, and its first content came within its TTFT SLO."""
        return self.answered and self.ttft_s is not None and self.ttft_s <= self.slo_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None: there was no second, or no answer."""
        if self.ttft_s is None or self.e2e_s is None or self.completion_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class InstanceShare:
    """One instance's part of a replay."""

    requests: int
    hit_rate: float | None
    """None: the instance reported it for no request."""
    p90_ttft_s: float


@dataclass(frozen=True, slots=True)
class CachedError:
    """|expected - reported| cached tokens over the answered requests."""

    mean_tokens: float
    within_16: float
    """Share of the requests."""
    within_128: float


@dataclass(kw_only=True, frozen=True, slots=True)
class ReplayReport:
    """The figures of a replay, its first ``skipped`` requests left out of all but the counts."""

    trace: str
    url: str
    rate_per_s: float
    """Mean rate of the arrivals: the trace's, or as it came out where requests wait for answers."""
    answers_per_s: float
    """Answers that ended between the first arrival and the last, a second: the throughput of a closed loop."""
    concurrency: int | None
    """Number of clients that were always busy; None: the trace's times and think times."""
    time_scale: float
    slo_ttft_s: float
    skipped: int
    sent: int
    answered: int
    failed: int
    unsent: int
    """Requests that were not sent because the replay was stopped; sent + unsent is the whole trace."""
    failures: Mapping[str, int]
    own_slos: int
    """Requests with an SLO other than ``slo_ttft_s``: their own, or one by length."""
    effective_capacity: float
    """Share of the requests sent whose TTFT met the SLO; failed ones did not."""
    slo_tpot_s: float
    """SLO of the time per output token."""
    both_slos: float
    """Share of the requests sent that met both SLOs; an answer of one token has no time per output token to miss."""
    ttft_s: Percentiles
    e2e_s: Percentiles
    tpot_s: Percentiles
    ttft_error_p50: float | None
    """|expected - actual| / actual TTFT over the requests whose estimate the router reported; None: for none."""
    ttft_error_p90: float | None
    ttft_error_s: Percentiles | None
    """Errors of the TTFT estimates in seconds."""
    hit_rate: float | None
    """Share of prompt tokens that instances report as cached; None: reported for no request."""
    cached_error: CachedError | None
    """None: expected or reported for no request."""
    load_cv: float | None
    """Mean of the coefficient of variation of pending tokens over instances, see ``results.load_cv``; None: not
    observed, or never a load."""
    migrations: int | None
    retried: int
    span_s: float
    """Time from the first arrival to the last answer."""
    p99_lag_s: float
    """Large values mean that the client was too slow for the rate, and the report not to be trusted."""
    instances: Mapping[str, InstanceShare]

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY)


@dataclass(kw_only=True, frozen=True, slots=True)
class ReplayRecord:
    """Everything that a replay leaves behind."""

    trace: str
    url: str
    rate_per_s: float | None
    """None: as the requests came, since some waited for answers."""
    time_scale: float
    slo_ttft_s: float
    skip_requests: int
    requests: Sequence[ReplayedRequest]
    """One for every request sent."""
    unsent: int
    samples: Sequence[LoadSample]
    migrations: int | None
    slo_tpot_s: float = TPOT_SLO_S
    skip_s: float = 0.0
    concurrency: int | None = None

    def counts(self, request: ReplayedRequest) -> bool:
        return request.index >= self.skip_requests and request.arrival_s >= self.skip_s


def summarize_replay(record: ReplayRecord) -> ReplayReport:
    """The figures of a replay."""
    counted = [request for request in record.requests if record.counts(request)]
    arrivals_s = [request.arrival_s for request in counted]
    answered = [request for request in counted if request.answered]
    errors, errors_s = _estimate_errors(answered)
    ttfts = [request.ttft_s for request in answered if request.ttft_s is not None]
    failures = Counter(request.failure for request in record.requests if request.failure is not None)
    lags = Percentiles.of([request.lag_s for request in counted])
    ends = [request.arrival_s + request.e2e_s for request in counted if request.e2e_s is not None]
    return ReplayReport(
        trace=record.trace,
        url=record.url,
        rate_per_s=len(counted) / span_s(arrivals_s) if record.rate_per_s is None else record.rate_per_s,
        answers_per_s=answers_per_s(
            arrivals_s, (one.arrival_s + one.e2e_s for one in counted if one.e2e_s is not None)
        ),
        concurrency=record.concurrency,
        time_scale=record.time_scale,
        slo_ttft_s=record.slo_ttft_s,
        skipped=len(record.requests) - len(counted),
        sent=len(record.requests),
        answered=sum(request.answered for request in record.requests),
        failed=sum(failures.values()),
        unsent=record.unsent,
        failures=dict(failures.most_common()),
        own_slos=sum(request.slo_s != record.slo_ttft_s for request in counted),
        effective_capacity=sum(request.on_time for request in counted) / max(1, len(counted)),
        slo_tpot_s=record.slo_tpot_s,
        both_slos=sum(meets_both(request, record.slo_tpot_s) for request in counted) / max(1, len(counted)),
        ttft_s=Percentiles.of(ttfts),
        e2e_s=Percentiles.of([request.e2e_s for request in answered if request.e2e_s is not None]),
        tpot_s=Percentiles.of([tpot for request in answered if (tpot := request.tpot_s) is not None]),
        ttft_error_p50=errors.p50 if errors else None,
        ttft_error_p90=errors.p90 if errors else None,
        ttft_error_s=errors_s,
        hit_rate=_hit_rate(answered),
        cached_error=_cached_error(answered),
        load_cv=load_cv(record.samples),
        migrations=record.migrations,
        retried=sum(request.attempts > 1 for request in counted),
        span_s=max(ends, default=0.0),
        p99_lag_s=lags.p99,
        instances=_instance_shares(answered),
    )


def _estimate_errors(requests: Sequence[ReplayedRequest]) -> tuple[Percentiles | None, Percentiles | None]:
    """The errors of the reported TTFT estimates: relative to the actual TTFT since sending, and in seconds."""
    pairs = [
        (request.expected_ttft_s, request.ttft_s - request.lag_s)
        for request in requests
        if request.expected_ttft_s is not None and request.ttft_s is not None and request.ttft_s > request.lag_s
    ]
    if not pairs:
        return None, None
    errors_s = [abs(expected_s - actual_s) for expected_s, actual_s in pairs]
    ratios = [error_s / actual_s for error_s, (_, actual_s) in zip(errors_s, pairs, strict=True)]
    return Percentiles.of(ratios), Percentiles.of(errors_s)


def _hit_rate(requests: Sequence[ReplayedRequest]) -> float | None:
    reported = [request.cached_tokens for request in requests if request.cached_tokens is not None]
    return sum(reported) / max(1, sum(request.prompt_tokens for request in requests)) if reported else None


def _cached_error(requests: Sequence[ReplayedRequest]) -> CachedError | None:
    """The error of the expected cached tokens. A request without a report has 0, if any request has one."""
    if all(request.cached_tokens is None for request in requests):
        return None
    errors = [
        abs(request.expected_cached_tokens - (request.cached_tokens or 0))
        for request in requests
        if request.expected_cached_tokens is not None
    ]
    if not errors:
        return None
    within_16, within_128 = (sum(error <= most for error in errors) / len(errors) for most in (16, 128))
    return CachedError(sum(errors) / len(errors), within_16, within_128)


def _instance_shares(answered: Sequence[ReplayedRequest]) -> dict[str, InstanceShare]:
    by_instance: defaultdict[str, list[ReplayedRequest]] = defaultdict(list)
    for request in answered:
        by_instance[request.instance_id].append(request)
    return {
        instance_id: InstanceShare(
            requests=len(requests),
            hit_rate=_hit_rate(requests),
            p90_ttft_s=Percentiles.of([request.ttft_s for request in requests if request.ttft_s is not None]).p90,
        )
        for instance_id, requests in sorted(by_instance.items())
    }


def _slo_title(report: ReplayReport) -> str:
    if report.own_slos:
        return f"TTFT within the request's SLO ({report.slo_ttft_s:g} s, its own, or by length)"
    return f"TTFT within {report.slo_ttft_s:g} s"


def _rate(report: ReplayReport) -> str:
    clients = "" if report.concurrency is None else f"{report.concurrency} clients, "
    return f"{clients}{report.rate_per_s:.2f} requests/s"


def report_rows(report: ReplayReport) -> list[tuple[str, str]]:
    """The report as (figure, value), for people."""
    rows = [
        ("trace", f"{report.trace}, {_rate(report)}"),
        ("sent / answered / failed", f"{report.sent} / {report.answered} / {report.failed}"),
        (_slo_title(report), f"{report.effective_capacity:.1%}"),
        (f"and {report.slo_tpot_s * 1e3:g} ms per output token", f"{report.both_slos:.1%}"),
        ("TTFT P50 / P90 / P99", _seconds(report.ttft_s)),
        ("TTFT estimate's error P50 / P90", _estimate_error(report)),
        ("E2E P50 / P90 / P99", _seconds(report.e2e_s)),
        ("time per output token P50 / P90", f"{report.tpot_s.p50 * 1e3:.0f} / {report.tpot_s.p90 * 1e3:.0f} ms"),
        ("hit rate", _share(report.hit_rate)),
        ("cached tokens' error mean, within 16 / 128", _cached_error_text(report.cached_error)),
        (
            "load variation (CV of pending tokens)",
            "not observed" if report.load_cv is None else f"{report.load_cv:.3f}",
        ),
        ("migrations", "not observed" if report.migrations is None else str(report.migrations)),
        ("retried", str(report.retried)),
        ("answers a second", f"{report.answers_per_s:.2f}"),
        ("span", f"{report.span_s:.0f} s"),
    ]
    if report.unsent:
        rows.append(("not sent (stopped)", str(report.unsent)))
    if report.skipped:
        rows.append(("left out of the figures", f"the first {report.skipped}"))
    if report.time_scale != 1:
        rows.append(("time scale", f"{report.time_scale:g}: all times are engine seconds"))
    if report.p99_lag_s > 0.05 * report.slo_ttft_s:
        rows.append(("client lag P99", f"{report.p99_lag_s:.2f} s: the client was too slow for this rate"))
    rows += [(f"failed: {reason}", str(count)) for reason, count in report.failures.items()]
    return rows


def report_tables(report: ReplayReport) -> tuple[Table, Table]:
    """The report, and each instance's part of it, as tables for a terminal."""
    figures = Table("figure", "value", title=f"Replay through {report.url}", title_justify="left")
    for row in report_rows(report):
        figures.add_row(*row)
    shares = Table("instance", "answered", "hit rate", "TTFT P90")
    for instance_id, share in report.instances.items():
        shares.add_row(instance_id, str(share.requests), _share(share.hit_rate), f"{share.p90_ttft_s:.2f} s")
    return figures, shares


def record_lines(requests: Sequence[ReplayedRequest]) -> bytes:
    """Every request's record as JSON lines."""
    return b"".join(orjson.dumps(asdict(request), option=orjson.OPT_APPEND_NEWLINE) for request in requests)


def _cached_error_text(error: CachedError | None) -> str:
    if error is None:
        return "not reported"
    return f"{error.mean_tokens:.0f} tokens, {error.within_16:.1%} / {error.within_128:.1%}"


def _estimate_error(report: ReplayReport) -> str:
    if report.ttft_error_p50 is None or report.ttft_error_p90 is None or report.ttft_error_s is None:
        return "not reported"
    seconds = report.ttft_error_s
    return f"{report.ttft_error_p50:.0%} / {report.ttft_error_p90:.0%}, {seconds.p50:.2f} / {seconds.p90:.2f} s"


def _share(share: float | None) -> str:
    return "not reported" if share is None else f"{share:.1%}"


def _seconds(times_s: Percentiles) -> str:
    return f"{times_s.p50:.2f} / {times_s.p90:.2f} / {times_s.p99:.2f} s"
