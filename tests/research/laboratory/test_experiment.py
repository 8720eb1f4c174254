from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.research.evaluate.work import Worker
from dualmap.research.laboratory.experiment import Rate, run_experiment
from dualmap.research.laboratory.run_cache import RunCache
from dualmap.research.laboratory.suite import PEERS, Suite
from dualmap.research.laboratory.variants import parse_variant
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.errors import SimulationError

BASE = SchedulingSettings()
VARIANTS = [parse_variant(text, BASE) for text in ("ours=dualmap-least-cost,queue_order=deadline", "peer=min-ttft")]


def test_every_variant_is_run_on_every_fleet_seed_and_rate(tiny_suite: Suite, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    worker = Worker(1, lambda *step: steps.append(step))

    experiment = run_experiment(tiny_suite, VARIANTS, BASE, RunCache(tmp_path), worker)

    (goodput,) = experiment.goodputs
    absolute, multiple = experiment.rates
    assert set(goodput.goodput_per_s) == {"ours", "peer"} == set(goodput.further["both"])
    for name, both in goodput.further["both"].items():
        assert all(one <= other for one, other in zip(both, goodput.goodput_per_s[name], strict=True))
    for result in experiment.rates:
        assert {name: len(own) for name, own in result.figures.items()} == {"ours": 2, "peer": 2}
    assert absolute.rates_per_s == (3.0, 3.0)
    assert multiple.rates_per_s == tuple(1.5 * rate for rate in goodput.saturation_per_s)
    assert steps[-1] == ("rates", 8, 8), "variants, seeds and rates"


def test_saturation_is_the_goodput_of_the_best_peer(tiny_suite: Suite) -> None:
    variants = [parse_variant(text, BASE) for text in PEERS]

    experiment = run_experiment(replace(tiny_suite, rates=("1x",)), variants, BASE, RunCache(None), Worker(1))

    (goodput,) = experiment.goodputs
    assert goodput.saturation_per_s == tuple(max(own) for own in zip(*goodput.goodput_per_s.values(), strict=True))
    for per_s, bounds in zip(goodput.saturation_per_s, goodput.bounds, strict=True):
        assert 0 < per_s < bounds.ideal_goodput_per_s


def test_processes_and_the_cache_change_nothing(tiny_suite: Suite, tmp_path: Path) -> None:
    suite = replace(tiny_suite, rates=("3",), goodput=False)

    here = run_experiment(suite, VARIANTS, BASE, RunCache(None), Worker(1))
    in_processes = run_experiment(suite, VARIANTS, BASE, RunCache(tmp_path), Worker(2))
    from_the_cache = run_experiment(suite, VARIANTS, BASE, RunCache(tmp_path), Worker(1))

    assert here == in_processes == from_the_cache


def test_without_goodput_and_multiples_nothing_is_searched(tiny_suite: Suite) -> None:
    steps: list[str] = []
    suite = replace(tiny_suite, rates=("3",), goodput=False)

    experiment = run_experiment(
        suite, VARIANTS[:1], BASE, RunCache(None), Worker(1, lambda *step: steps.append(step[0]))
    )

    assert experiment.goodputs == ()
    assert len(experiment.rates) == 1


@pytest.mark.parametrize("text", ["fast", "x", "0", "-1x", "inf", ""])
def test_a_rate_that_is_none_is_named(text: str) -> None:
    with pytest.raises(SimulationError, match="must be requests per second, or like 1"):
        Rate.parse(text)


def test_rates_are_absolute_or_multiples() -> None:
    assert Rate.parse("12.5") == Rate(12.5, of_saturation=False)
    assert Rate.parse("1.5x") == Rate(1.5, of_saturation=True)
    assert [Rate.parse(text).label for text in ("12.5", "1.5x")] == ["12.5/s", "1.5 × saturation"]
