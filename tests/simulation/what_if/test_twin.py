from dataclasses import replace

import pytest

from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.simulation.engine.settings import EngineSettings
from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.what_if import twin
from dualmap.simulation.what_if.comparison import figures
from dualmap.simulation.what_if.measured import measured_outcomes, share_measured
from dualmap.simulation.what_if.twin import (
    Forecast,
    TwinJob,
    TwinRun,
    check_forecast,
    forecast,
    is_off,
    middle_part,
    pace_for,
)
from dualmap.simulation.workload.generators import uniform
from dualmap.simulation.workload.traces import Measured, Trace

TRACE = uniform(requests=300, seed=3).at_rate(4.0)


def scenario(skip_s: float = 0.0) -> Scenario:
    return Scenario(SchedulingSettings(), EngineSettings().engine_config(), instances=3, skip_s=skip_s)


def slowed(factor: float) -> TwinRun:
    return TwinJob(TRACE, scenario().slowed(factor)).run()


def recorded(trace: Trace, outcomes: list[RequestOutcome], slower: float = 1.0) -> Trace:
    """The trace as a fleet would have recorded it that served it so, or so many times slower."""
    requests = [
        replace(request, measured=Measured(slower * served.e2e_s, slower * served.ttft_s, served.cached_tokens))
        for request, served in zip(trace.requests, outcomes, strict=True)
    ]
    return replace(trace, requests=tuple(requests))


def test_a_twin_of_the_fleet_that_was_recorded_forecasts_what_was_measured() -> None:
    run = TwinJob(TRACE, scenario()).run()
    recording = recorded(TRACE, list(run.outcomes))

    checked = check_forecast(recording, run, SchedulingSettings(), figures(0.1), skip_s=0.0)

    assert [one.figure.name for one in checked][:2] == ["on time", "both SLOs"]
    assert all(one.then == pytest.approx(one.now) for one in checked)
    assert not any(map(is_off, checked))


def test_a_twin_that_is_faster_than_the_fleet_is_off() -> None:
    run = TwinJob(TRACE, scenario()).run()
    recording = recorded(TRACE, list(run.outcomes), slower=1.4)

    checked = check_forecast(recording, run, SchedulingSettings(), figures(), skip_s=0.0)

    off = {one.figure.name for one in checked if is_off(one)}
    assert {"TTFT P50", "TTFT P90", "time a token"} <= off
    assert "found in cache" not in off


def test_the_pace_of_slower_engines_is_found_and_corrects_a_forecast() -> None:
    recording = recorded(TRACE, list(slowed(1.25).outcomes))

    made = forecast(
        recording, scenario(), replace(scenario(), instances=4), figures(), lambda jobs: [one.run() for one in jobs]
    )

    assert made.pace == pytest.approx(1.25, abs=0.03)
    assert any(map(is_off, check_forecast(recording, slowed(1.0), SchedulingSettings(), figures(), skip_s=0.0)))
    assert not any(map(is_off, made.checked))
    assert made.changed.outcomes != made.as_is.outcomes


PART = 60


class MadeUpRuns:
    """Runs whose times grow with a power of the pace, and counts of them. A part may be slower than the whole."""

    def __init__(self, growth: float = 2.0, part_slower: float = 1.0) -> None:
        self.growth = growth
        self.part_slower = part_slower
        self.whole = 0
        self.of_part = 0

    def __call__(self, jobs: list[TwinJob]) -> list[TwinRun]:
        return [self._run(job) for job in jobs]

    def _run(self, job: TwinJob) -> TwinRun:
        pace = job.scenario.engine.costs.token_s / scenario().engine.costs.token_s
        whole = len(job.trace.requests) == len(TRACE.requests)
        self.whole += whole
        self.of_part += not whole
        return TwinRun(served(job.trace, (1.0 if whole else self.part_slower) * pace**self.growth), 1.0)


def served(trace: Trace, slower: float) -> list[RequestOutcome]:
    requests = [
        replace(each, measured=Measured((0.5 + 0.02 * each.output_tokens) * slower, 0.5 * slower))
        for each in trace.requests
    ]
    return measured_outcomes(replace(trace, requests=tuple(requests)), SchedulingSettings())


def forecast_of(recording: Trace, runs: MadeUpRuns) -> Forecast:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(twin, "PART_REQUESTS", PART)
        return forecast(recording, scenario(), scenario(), figures(), runs)


@pytest.mark.parametrize("growth", [1.0, 2.0, 3.0])
def test_a_pace_that_a_part_shows_costs_runs_of_the_part_and_none_of_the_whole(growth: float) -> None:
    runs = MadeUpRuns(growth)

    made = forecast_of(recorded(TRACE, served(TRACE, 1.25**growth)), runs)

    assert made.pace == pytest.approx(1.25, rel=0.02)
    assert not any(map(is_off, made.checked))
    assert made.changed.outcomes == made.as_is.outcomes == served(TRACE, made.pace**growth)
    assert runs.whole == 2
    assert runs.of_part <= 1 + twin.MOST_STEPS


@pytest.mark.parametrize("slower", [1.0, 1.01, 1.1])
def test_a_twin_that_is_not_off_has_no_pace(slower: float) -> None:
    runs = MadeUpRuns()

    made = forecast_of(recorded(TRACE, served(TRACE, slower)), runs)

    assert made.pace == 1.0
    assert (runs.whole, runs.of_part) == (2, 1)


def test_a_recording_without_measurements_has_no_pace() -> None:
    runs = MadeUpRuns()

    made = forecast_of(TRACE, runs)

    assert (made.pace, made.checked) == (1.0, ())
    assert (runs.whole, runs.of_part) == (2, 0)


@pytest.mark.parametrize("part_slower", [1.25**2, 0.7, 2.0])
def test_a_pace_that_a_part_does_not_show_is_that_of_the_whole(part_slower: float) -> None:
    runs = MadeUpRuns(part_slower=part_slower)

    made = forecast_of(recorded(TRACE, served(TRACE, 1.25**2)), runs)

    assert made.pace == pytest.approx(1.25, rel=0.02)
    assert not any(map(is_off, made.checked))
    assert runs.whole == 4


@pytest.mark.parametrize("part_slower", [0.7, 1.5])
def test_a_pace_of_a_part_is_not_kept_where_the_whole_has_none(part_slower: float) -> None:
    runs = MadeUpRuns(part_slower=part_slower)

    made = forecast_of(recorded(TRACE, served(TRACE, 1.0)), runs)

    assert made.pace == 1.0
    assert runs.whole == 3


def test_a_part_is_from_the_middle_and_all_of_a_short_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "PART_REQUESTS", 4)

    assert middle_part(TRACE.window(0, 10)) == TRACE.window(3, 4)
    assert middle_part(TRACE.window(0, 3)) == TRACE.window(0, 3)


@pytest.mark.parametrize("growth", [1.0, 2.0, 3.3])
def test_a_pace_is_found_in_few_steps_however_times_per_token_grow(growth: float) -> None:
    tried: list[float] = []

    def tpot_s(pace: float) -> float:
        tried.append(pace)
        return 0.02 * float(pace**growth)

    assert pace_for(tpot_s(1.25), tpot_s, 1.0) == pytest.approx(1.25, rel=twin.LEAST_ERROR)
    assert len(tried) <= 2 + twin.MOST_STEPS
    assert pace_for(1.01 * tpot_s(1.1), tpot_s, 1.1) == 1.1, "good enough"
    assert pace_for(0.03, lambda pace: None, 1.1) == 1.1, "no answer has several tokens"


def test_the_warm_up_counts_on_neither_side() -> None:
    run = TwinJob(TRACE, scenario(skip_s=20.0)).run()
    whole = TwinJob(TRACE, scenario()).run()
    recording = recorded(TRACE, list(whole.outcomes))

    checked = check_forecast(recording, run, SchedulingSettings(), figures(), skip_s=20.0)

    assert len(run.outcomes) < len(whole.outcomes)
    assert all(one.then == pytest.approx(one.now) for one in checked)


def test_a_recording_without_measurements_checks_nothing() -> None:
    run = TwinJob(TRACE, scenario()).run()

    assert check_forecast(TRACE, run, SchedulingSettings(), figures(), skip_s=0.0) == ()
    assert share_measured(TRACE.requests) == 0.0


def test_a_request_is_judged_by_its_own_slo_then_by_that_of_its_class() -> None:
    scheduling = SchedulingSettings(
        slo_ttft_s=9.0,
        classes=(
            PriorityClassSettings(name="high", slo_ttft_s=2.0),
            PriorityClassSettings(name="default", slo_ttft_s=8.0),
            PriorityClassSettings(name="low"),
        ),
    )
    first, second, third = (replace(each, measured=Measured(1.0, 0.5)) for each in TRACE.requests[:3])
    requests = (replace(first, slo_ttft_s=1.0), replace(second, priority="high"), third, replace(third, priority="low"))
    trace = replace(TRACE, requests=requests)

    outcomes = measured_outcomes(trace, scheduling)
    run = TwinJob(trace, replace(scenario(), scheduling=scheduling)).run()

    assert [outcome.slo_s for outcome in outcomes] == [1.0, 2.0, 8.0, 9.0]
    assert [outcome.slo_s for outcome in run.outcomes] == [1.0, 2.0, 8.0, 9.0]


def test_an_answer_whose_first_token_was_not_seen_is_not_compared() -> None:
    requests = tuple(
        replace(each, measured=Measured(1.0, 0.5 if number % 2 else None)) for number, each in enumerate(TRACE.requests)
    )

    assert len(measured_outcomes(replace(TRACE, requests=requests), SchedulingSettings())) == len(requests) // 2
    assert share_measured(requests) == 0.5
