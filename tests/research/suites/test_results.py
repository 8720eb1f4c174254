from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.research.bench import Bench
from dualmap.research.run_cache import RunCache
from dualmap.research.suites.results import Rate, run_suite, variants_of
from dualmap.research.suites.suite import CROSSED, PEERS, SUITES, Suite
from dualmap.research.variant import VariantError
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.errors import SimulationError

BASE = SchedulingSettings()
VARIANTS = ("ours=dualmap-least-cost,queue_order=deadline", "peer=min-ttft")


def test_every_variant_is_run_under_every_workload_seed_and_rate(tiny_suite: Suite, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    bench = Bench(1, RunCache(tmp_path), lambda *step: steps.append(step))

    outcome = run_suite(replace(tiny_suite, variants=VARIANTS), BASE, bench)

    (goodput,) = outcome.goodputs
    absolute, multiple = outcome.rates
    assert set(goodput.goodput_per_s) == {"ours", "peer"} == set(goodput.further["both"])
    for name, both in goodput.further["both"].items():
        assert all(one <= other for one, other in zip(both, goodput.goodput_per_s[name], strict=True))
    for result in outcome.rates:
        assert {name: len(own) for name, own in result.figures.items()} == {"ours": 2, "peer": 2}
    assert absolute.rates_per_s == (3.0, 3.0)
    assert multiple.rates_per_s == tuple(1.5 * rate for rate in goodput.saturation_per_s)
    assert steps[-1] == ("rates", 8, 8), "variants, seeds and rates"


def test_saturation_is_the_goodput_of_the_best_peer(tiny_suite: Suite) -> None:
    outcome = run_suite(replace(tiny_suite, rates=("1x",), variants=PEERS), BASE, Bench())

    (goodput,) = outcome.goodputs
    assert goodput.saturation_per_s == tuple(max(own) for own in zip(*goodput.goodput_per_s.values(), strict=True))
    for per_s, bounds in zip(goodput.saturation_per_s, goodput.bounds, strict=True):
        assert 0 < per_s < bounds.ideal_goodput_per_s


def test_processes_and_the_cache_change_nothing(tiny_suite: Suite, tmp_path: Path) -> None:
    suite = replace(tiny_suite, rates=("3",), goodput=False, variants=VARIANTS)

    here = run_suite(suite, BASE, Bench())
    in_processes = run_suite(suite, BASE, Bench(2, RunCache(tmp_path)))
    from_the_cache = run_suite(suite, BASE, Bench(1, RunCache(tmp_path)))

    assert here == in_processes == from_the_cache


def test_without_goodput_and_multiples_nothing_is_searched(tiny_suite: Suite) -> None:
    steps: list[str] = []
    suite = replace(tiny_suite, rates=("3",), goodput=False, variants=VARIANTS[:1])

    outcome = run_suite(suite, BASE, Bench(on_step=lambda *step: steps.append(step[0])))

    assert outcome.goodputs == ()
    assert len(outcome.rates) == 1
    assert set(steps) == {"rates"}


def test_two_variants_of_one_name_are_an_error(tiny_suite: Suite) -> None:
    with pytest.raises(VariantError, match="two variants are named 'a'"):
        run_suite(replace(tiny_suite, variants=("a=dualmap", "a=llm-d")), BASE, Bench())


def test_unless_it_says_otherwise_a_suite_runs_every_policy_with_both_orders() -> None:
    names = [variant.name for variant in variants_of(Suite("plain"), BASE)]

    assert names[0] == "least-cost deadline"
    for policy in ("least-cost", "dualmap", "llm-d", "preble", "min-ttft", "dynamo", "sglang"):
        assert {f"{policy} deadline", f"{policy} fifo"} < set(names)
    assert len(names) == len(CROSSED)


@pytest.mark.parametrize("name", ["splits", "split-or-whole"])
def test_suites_of_split_fleets_bring_their_own_variants(name: str) -> None:
    variants = variants_of(SUITES[name], BASE)

    assert SUITES[name].saturation_of == "4P4D"
    assert {None, "4P4D", "5P3D", "6P2D"} <= {variant.options.roles for variant in variants}
    modes = {variant.scheduling.split.mode for variant in variants if variant.options.roles}
    assert modes <= {"always", "never", "auto"}


@pytest.mark.parametrize("text", ["fast", "x", "0", "-1x", "inf", ""])
def test_a_rate_that_is_none_is_named(text: str) -> None:
    with pytest.raises(SimulationError, match="must be requests per second, or like 1"):
        Rate.parse(text)


def test_rates_are_absolute_or_multiples() -> None:
    assert Rate.parse("12.5") == Rate(12.5, of_saturation=False)
    assert Rate.parse("1.5x") == Rate(1.5, of_saturation=True)
    assert [Rate.parse(text).label for text in ("12.5", "1.5x")] == ["12.5/s", "1.5 × saturation"]
    assert Rate.parse("64c").label == "64 clients"


def test_a_number_of_clients_takes_the_place_of_a_rate(tiny_suite: Suite) -> None:
    outcome = run_suite(replace(tiny_suite, rates=("6c",), goodput=False, variants=VARIANTS), BASE, Bench())

    (result,) = outcome.rates
    assert result.rates_per_s == tuple(one.rate_per_s for one in result.figures["ours"])
    for figures in result.figures["ours"]:
        assert figures.answers_per_s == pytest.approx(figures.rate_per_s, rel=0.25)
