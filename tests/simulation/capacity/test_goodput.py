import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.capacity.bounds import bounds_of
from dualmap.simulation.capacity.goodput import GoodputJob, find_goodput, run_goodput
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.runs import RunJob
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource

ENGINE = find_preset("qwen2.5-7b-910b4").engine
SOURCE = TraceSource("uniform", requests=300)
SCENARIO = Scenario(SchedulingSettings(), ENGINE, instances=2)


@pytest.mark.parametrize("start", [0.1, 7.0, 200.0])
def test_bisection_finds_the_rate_from_either_side(start: float) -> None:
    found = find_goodput(lambda rate: 1.0 if rate <= 7.3 else 0.5, start, tolerance=0.001)

    assert found.rate_per_s == pytest.approx(7.3, rel=0.001)
    assert found.rate_per_s <= 7.3 < found.upper_rate_per_s


def test_what_is_known_already_is_not_tried_again() -> None:
    share = lambda rate: 1.0 - rate / 100  # noqa: E731
    first = find_goodput(share, 5.0, wanted_share=0.90, tolerance=0.01)

    again = find_goodput(share, 5.0, wanted_share=0.90, tolerance=0.01, known=first.tried)
    stricter = find_goodput(share, 5.0, wanted_share=0.95, tolerance=0.01, known=first.tried)

    assert (again.rate_per_s, again.tried) == (first.rate_per_s, ())
    assert stricter.rate_per_s == pytest.approx(5.0, rel=0.02)
    assert not set(stricter.tried) & set(first.tried)


def test_a_start_far_off_costs_few_runs() -> None:
    found = find_goodput(lambda rate: 1.0 if rate <= 2.0 else 0.5, 40.0, tolerance=0.02, growth=1.15)

    assert found.rate_per_s == pytest.approx(2.0, rel=0.02)
    assert len(found.tried) < 14


def test_a_fleet_that_never_holds_has_no_goodput() -> None:
    found = find_goodput(lambda _: 0.0, 1.0)

    assert found.rate_per_s == 0.0
    assert len(found.tried) < 15, "the search gives up"


def test_the_search_runs_the_simulator_and_stays_below_the_ideal() -> None:
    told: list[tuple[float, float]] = []
    found = run_goodput(GoodputJob(RunJob(SOURCE, SCENARIO, 2.0), tolerance=0.05), lambda *tried: told.append(tried))

    assert tuple(sorted(told)) == found.tried
    at_rate = simulate(SOURCE.load(found.rate_per_s), SCENARIO)
    assert at_rate.effective_capacity >= 0.9
    assert 0 < found.rate_per_s < bounds_of(SOURCE.load(), ENGINE, 2, 5.0).ideal_goodput_per_s
