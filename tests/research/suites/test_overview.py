from dataclasses import replace

from dualmap.research.suites.overview import overview_tables
from dualmap.research.variant import ScenarioOptions
from tests.research.suites.samples import crossed, outcome


def test_with_one_order_every_variant_has_its_row_and_with_two_the_first_and_the_best_others() -> None:
    alone, both = (overview_tables(made)[-1] for made in (outcome(), crossed()))

    assert [row[1] for row in alone.rows] == ["ours", "peer", "other"]
    assert [row[1] for row in both.rows] == ["a deadline", "b deadline", "a fifo", "b fifo"]


def test_a_fleet_with_roles_is_told_with_both_slos_and_what_was_split() -> None:
    made = outcome()
    split = replace(made.variants[0], options=ScenarioOptions(roles="4P4D"))
    figures = {"ours": tuple(replace(one, both_tight=0.8, split_share=0.5) for one in made.rates[0].figures["ours"])}
    rate = replace(made.rates[0], figures={**made.rates[0].figures, **figures})
    made = replace(made, variants=(split, *made.variants[1:]), rates=(rate,))

    table, fleets, _ = overview_tables(made)[-3:]

    assert table.title == "Prefill and decode apart at 1.5 × saturation"
    ours = dict(zip(table.columns, table.rows[0], strict=True))
    assert (ours["both SLOs"], ours["split"], ours["TTFT P90 s"], ours["TPOT P90 ms"]) == ("80.0", "50", "2.00", "80")
    assert fleets.title == "Fleets at 1.5 × saturation"
    cells = {row[1]: dict(zip(fleets.columns, row, strict=True)) for row in fleets.rows}
    assert (cells["ours"]["4P4D"], cells["ours"]["mixed"]) == ("2.00 / 80 / 80.0", "")
    assert (cells["peer"]["4P4D"], cells["peer"]["mixed"]) == ("", "2.00 / 80 / 0.0")


def test_variants_over_the_same_split_are_compared_seed_by_seed() -> None:
    made = outcome()
    variants = tuple(replace(one, options=ScenarioOptions(roles="4P4D")) for one in made.variants)
    both = {"ours": (0.9, 0.8), "peer": (0.8, 0.72), "other": (0.5, 0.5)}
    first = {name: own[0] for name, own in made.rates[0].figures.items()}
    ttft_s = {"ours": 2.2, "peer": 2.0, "other": 4.0}
    figures = {
        name: tuple(replace(first[name], both_tight=share, ttft_p90_s=ttft_s[name]) for share in shares)
        for name, shares in both.items()
    }
    made = replace(made, variants=variants, rates=(replace(made.rates[0], figures=figures),))

    table = overview_tables(made)[-1]

    assert table.title == "Seed by seed at 1.5 × saturation"
    (row,) = table.rows
    assert row[1:] == ("ours", "+9.0 ± 12.7", "peer", "+10.0 ± 0.0", "peer")


def test_shares_are_told_by_length_and_by_tokens() -> None:
    table = overview_tables(outcome())[-1]

    assert table.title == "By length of prompts at 1.5 × saturation"
    ours = dict(zip(table.columns, table.rows[0], strict=True))
    assert (ours["on time"], ours["by tokens"], ours["longest"], ours["of the longest"]) == ("90", "70", "75", "8")
    assert (ours["TPOT P50 ms"], ours["P90 ms"]) == ("40", "80")


def test_the_share_on_time_stands_beside_the_best_other_with_the_same_order_and_losses_are_counted() -> None:
    table = overview_tables(crossed())[0]

    assert table.title == "On time beside the best other with the same order"
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["workload"], row["instances"]) == ("uniform", "8 × 7B")
    assert row["deadline, 1.5 ×: ours"] == "80.0"
    assert table.rows[0][3:5] == ("66.7 b", "+20.0 ± 0.0")
    assert table.rows[0][5:8] == ("60.0", "66.7 b", "-10.0 ± 0.0")
    told = "behind by more than 1 % in {} of 1 rows, in {} of them beyond the spread of the seeds; mean lead {} %."
    (note,) = table.notes
    assert f"Deadline, 1.5 ×: {told.format(0, 0, '+20.0')}" in note
    assert f"Fifo, 1.5 ×: {told.format(1, 1, '-10.0')}" in note


def test_a_rate_that_a_fleet_was_not_run_at_is_absent() -> None:
    made = crossed()
    other = replace(next(iter(made.seeds)), instances=2)

    table = overview_tables(replace(made, seeds={**made.seeds, other: (1, 2)}))[0]

    assert table.rows[1] == ("uniform", "2 × 7B", *"–" * 6)
