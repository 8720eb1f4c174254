from dataclasses import replace

from dualmap.research.suites.details import render_markdown
from dualmap.research.suites.results import Rate, RateResult, SuiteResult
from dualmap.research.suites.summary import summary_tables
from dualmap.research.table import Table
from dualmap.simulation.capacity.bounds import Bounds
from tests.research.suites.samples import FIGURES, WORKLOAD, outcome

OVERLOAD = Rate(1.5, of_saturation=True)


def at(rate: Rate, seeds: int = 2) -> RateResult:
    """Ours has 90 % on time, at most 14 s held and 7 refused; the peer has more hits and is slower."""
    peer = replace(FIGURES, on_time=0.8, ttft_p90_s=2.5, hit_rate=0.55, e2e_p99_s=61.0)
    ours = [replace(FIGURES, refused=0.01, longest_hold_s=12.0 + seed) for seed in range(1, seeds + 1)]
    return RateResult(
        WORKLOAD,
        rate,
        (15.0,) * seeds,
        {"ours": tuple(ours), "peer": (peer,) * seeds, "other": (replace(FIGURES, on_time=0.1),) * seeds},
    )


def with_rates(*results: RateResult) -> SuiteResult:
    return replace(outcome(), rates=results)


def row(tables: list[Table], title: str) -> dict[str, str]:
    (table,) = (one for one in tables if one.title == title)
    assert len(table.rows) == 1
    return dict(zip(table.columns, table.rows[0], strict=True))


def test_a_fleets_goodput_is_one_row_with_the_best_other_and_every_difference_of_two_seeds() -> None:
    assert row(summary_tables(outcome()), "Goodput") == {
        "fleet": "uniform, 8 × 7B",
        "ours": "11.50",
        "best other": "peer 10.00",
        "difference": "+10.0 and +20.0 %",
        "first in": "2/2",
        "sustainable rate": "15.0",
        "length": "1.2 min",
    }


def test_more_seeds_than_two_have_an_interval_and_one_has_none() -> None:
    made = outcome(seeds=(1, 2, 3))
    three = replace(
        made.goodputs[0],
        goodput_per_s={"ours": (11.0, 12.0, 13.0), "peer": (10.0, 10.0, 10.0)},
        bounds=(Bounds(20.0, 15.0),) * 3,
    )
    one = replace(three, goodput_per_s={"ours": (9.0,), "peer": (10.0,)}, bounds=(Bounds(20.0, 15.0),))

    assert row(summary_tables(replace(made, goodputs=(three,))), "Goodput")["difference"] == "+20.0 ± 24.8 %"
    assert row(summary_tables(replace(made, goodputs=(one,))), "Goodput")["difference"] == "-10.0 %"


def test_where_nobody_has_a_goodput_there_is_no_difference_and_no_length() -> None:
    made = outcome()
    none = replace(made.goodputs[0], goodput_per_s={"ours": (0.0, 0.0), "peer": (0.0, 0.0)})

    found = row(summary_tables(replace(made, goodputs=(none,))), "Goodput")

    assert (found["difference"], found["length"], found["first in"]) == ("–", "–", "2/2")


def test_below_saturation_every_load_tells_who_is_on_time_and_the_last_the_rest() -> None:
    made = with_rates(at(Rate(0.8, of_saturation=True)), at(Rate(0.9, of_saturation=True)), at(OVERLOAD))

    assert row(summary_tables(made), "At fixed loads") == {
        "fleet": "uniform, 8 × 7B",
        "0.8 ×: on time": "90.0 / 80.0 peer",
        "0.9 ×: on time": "90.0 / 80.0 peer",
        "0.9 ×: TTFT P90": "2.00 s / 2.00 s other",
        "0.9 ×: hit rate": "50.0 / 55.0 peer",
        "0.9 ×: E2E P99": "60 s / 60 s other",
    }


def test_overload_has_a_table_of_its_own_with_the_others_range() -> None:
    made = with_rates(at(Rate(0.9, of_saturation=True)), at(OVERLOAD, seeds=3))

    assert row(summary_tables(made), "At 1.5 × saturation") == {
        "fleet": "uniform, 8 × 7B",
        "1.5 ×: on time": "90.0 ± 0.0",
        "others": "10.0 to 80.0",
        "refused": "1 %",
        "hit rate": "50.0 / 55.0 peer",
        "longest hold": "15 s",
        "E2E P99": "60 s / 60 s other",
    }


def test_the_estimate_is_the_first_variants_and_undisturbed_at_the_first_load() -> None:
    made = with_rates(at(Rate(0.8, of_saturation=True)), at(Rate(0.9, of_saturation=True)), at(OVERLOAD))

    assert row(summary_tables(made), "The estimate") == {
        "fleet": "uniform, 8 × 7B",
        "error P50, P90 at 0.8 ×": "10, 30 %",
        "error P50, P90 at 0.9 ×": "10, 30 %",
        "undisturbed at 0.8 ×: share": "25 %",
        "P50, P90": "5, 15 %",
    }


def test_rates_in_requests_per_second_are_taken_for_bearable() -> None:
    tables = summary_tables(replace(with_rates(at(Rate(12, of_saturation=False))), goodputs=()))

    assert [table.title for table in tables] == ["At fixed loads", "The estimate"]
    assert row(tables, "At fixed loads")["12/s: on time"] == "90.0 / 80.0 peer"


def test_a_fleet_that_a_load_is_missing_of_has_a_gap_there_and_one_without_any_no_row() -> None:
    small, smaller = replace(WORKLOAD, instances=4), replace(WORKLOAD, instances=2)
    low, high = at(Rate(12, of_saturation=False)), at(Rate(0.9, of_saturation=True))
    made = replace(
        with_rates(low, high, replace(low, workload=small)), seeds={WORKLOAD: (1, 2), small: (1, 2), smaller: (1, 2)}
    )

    (table,) = (one for one in summary_tables(made) if one.title == "At fixed loads")

    assert [one[0] for one in table.rows] == ["uniform, 8 × 7B", "uniform, 4 × 7B"]
    assert table.rows[1][1:] == ("90.0 / 80.0 peer", "–", "–", "–", "–")


def test_a_single_variant_has_no_summary() -> None:
    made = outcome()
    alone = replace(
        made,
        variants=made.variants[:1],
        goodputs=tuple(replace(one, goodput_per_s={"ours": one.goodput_per_s["ours"]}) for one in made.goodputs),
        rates=tuple(replace(one, figures={"ours": one.figures["ours"]}) for one in made.rates),
    )

    assert summary_tables(alone) == []
    assert "Summary" not in render_markdown(alone)


def test_the_report_begins_with_the_summary_in_markdown_to_paste() -> None:
    text = render_markdown(outcome())

    assert "\n".join((
        "## Summary",
        "",
        "### Goodput",
        "",
        "| fleet | ours | best other | difference | first in | sustainable rate | length |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| uniform, 8 × 7B | 11.50 | peer 10.00 | +10.0 and +20.0 % | 2/2 | 15.0 | 1.2 min |",
    )) in text  # fmt: skip
    assert text.index("### At 1.5 × saturation") < text.index("## uniform, 8 × 7B: goodput")
