import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualmap.research.suites.details import render_markdown
from dualmap.research.suites.results import SuiteResult
from dualmap.research.suites.results_file import ResultsError, read_outcome, render_json
from dualmap.research.variant import parse_variant
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.capacity.bounds import Bounds
from tests.research.suites.samples import FIGURES, outcome


def written(folder: Path, made: SuiteResult, change: Callable[[Any], object] | None = None) -> Path:
    document = json.loads(render_json(made))
    if change is not None:
        change(document)
    (folder / "results.json").write_text(json.dumps(document))
    return folder


def test_the_json_holds_every_figure_of_every_seed() -> None:
    document = json.loads(render_json(outcome()))

    assert document["goodput"][0]["goodput_per_s"]["ours"] == [11.0, 12.0]
    assert document["rates"][0]["figures"]["other"]["on_time"] == [0.1, 0.85]
    assert document["goodput"][0]["bounds"][0] == pytest.approx(
        {"ideal_goodput_per_s": 20.0, "sustainable_per_s": 15.0}
    )


def test_what_was_written_is_read_again_and_makes_the_same_report(tmp_path: Path) -> None:
    told = (
        "ours=dualmap-least-cost,policy_options.deferred_weight=0.2",
        "peer=llm-d,dispatch=direct",
        "other=preble",
    )
    made = replace(outcome(), variants=tuple(parse_variant(text, SchedulingSettings()) for text in told))

    found = read_outcome(written(tmp_path, made))

    assert found == made
    assert render_markdown(found) == render_markdown(made)


def test_an_ideal_goodput_without_end_survives_json(tmp_path: Path) -> None:
    made = outcome()
    short = replace(made.goodputs[0], bounds=(Bounds(float("inf"), 15.0), Bounds(24.0, 15.0)))
    made = replace(made, goodputs=(short,))

    assert read_outcome(written(tmp_path, made)) == made


def test_a_figure_that_is_the_default_for_every_seed_is_left_out(tmp_path: Path) -> None:
    made = outcome()
    split = {**made.rates[0].figures, "peer": (FIGURES, replace(FIGURES, split_share=0.5))}
    made = replace(made, rates=(replace(made.rates[0], figures=split),))

    figures = json.loads(render_json(made))["rates"][0]["figures"]

    assert "split_share" not in figures["ours"]
    assert figures["peer"]["split_share"] == [0.0, 0.5]
    assert read_outcome(written(tmp_path, made)) == made


def test_the_order_of_the_variants_counts_wherever_figures_stand(tmp_path: Path) -> None:
    def replaced(document: Any) -> None:
        figures = document["rates"][0]["figures"]
        figures["ours"] = figures.pop("ours")

    made = read_outcome(written(tmp_path, outcome(), replaced))

    assert list(made.rates[0].figures) == ["ours", "peer", "other"]


def _drop(*path: str | int) -> Callable[[Any], object]:
    def change(document: Any) -> None:
        *way, last = path
        for step in way:
            document = document[step]
        del document[last]

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_drop("goodput", 0, "bounds"), "goodput.0.bounds: Field required"),
        (_drop("rates", 0, "figures", "ours", "hit_rate"), "hit_rate: Field required"),
        (_drop("rates", 0, "figures", "ours", "hit_rate", 1), "figures of different numbers of seeds"),
        (lambda document: document["rates"][0]["figures"].update(ours=[1]), "has no figures by name"),
        (lambda document: document["rates"][0]["figures"]["ours"].update(hit_rate=1), "a figure has no list of values"),
        (_drop("rates", 0, "figures", "peer"), "figures of ours, other, but the variants are ours, peer, other"),
        (lambda document: document["variants"]["peer"].update(gone=1), "unknown setting 'gone'"),
        (lambda document: document["variants"]["peer"].update(policy="gone"), "unknown policy 'gone'"),
        (lambda document: document["rates"][0].update(rate="7/s"), "rate '7/s' is none of the suite's"),
        (lambda document: document["rates"][0].update(rates_per_s=[0, 1]), "greater than 0"),
    ],
)
def test_a_damaged_or_older_file_is_named_with_the_place_and_what_to_do(
    change: Callable[[Any], object], reason: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, outcome(), change)

    with pytest.raises(ResultsError) as caught:
        read_outcome(folder)

    assert str(folder / "results.json") in str(caught.value)
    assert reason in str(caught.value)
    assert "run the suite again with --out" in str(caught.value)


def test_what_is_no_json_or_no_file_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{")

    with pytest.raises(ResultsError, match=r"Invalid JSON.*run the suite again"):
        read_outcome(tmp_path)
    with pytest.raises(ResultsError, match="No such file or directory; name the folder that --out"):
        read_outcome(tmp_path / "elsewhere")
