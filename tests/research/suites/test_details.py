from dataclasses import replace

from rich.console import Console

from dualmap.research.suites.details import detail_tables, render_markdown
from dualmap.research.table import rich_table
from dualmap.simulation.capacity.bounds import Bounds
from tests.research.suites.samples import outcome


def test_the_goodput_stands_beside_its_bounds_and_the_best_other() -> None:
    table = detail_tables(outcome())[0]

    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["ours"][1:] == ("52%", "2/2"), "11 of 20 and 12 of 24"
    assert rows["(ideal goodput)"][0].startswith("22.00 ±")
    assert rows["(sustainable rate)"][0] == "15.00 ± 0.00"
    assert "ours against the best other, peer: +15.0 ± 63.5 %" in table.notes[0]
    assert table.notes[1] == "The ranking is the same in every seed: ours > peer > other."


def test_a_rate_tells_every_figure_with_its_interval() -> None:
    table = detail_tables(outcome())[1]

    assert table.title == "uniform, 8 × 7B: at 1.5 × saturation (15.00 ± 0.00/s), 2 seeds"
    ours = dict(zip(table.columns, table.rows[0], strict=True))
    assert ours["on time %"] == "90.0 ± 0.0"
    assert ours["hold s"] == "12.0 ± 0.0"
    assert ours["first"] == "2/2"
    assert (ours["undisturbed %"], ours["undisturbed P90 %"]) == ("25 ± 0", "15 ± 0")
    assert "on time: ours against the best other, peer: +10.0 ± 0.0 points." in table.notes
    assert "First: ours in 2/2; the order behind differs between seeds." in table.notes


def test_seeds_that_had_to_be_left_out_are_told() -> None:
    notes = detail_tables(outcome(seeds=(1, 2, 3)))[1].notes

    assert "1 seed left out: there no FIFO policy has 90 % on time at any rate." in notes


def test_goodput_above_the_sustainable_rate_is_put_down_to_the_length_of_the_trace() -> None:
    made = outcome()
    short = replace(made.goodputs[0], bounds=(Bounds(20.0, 10.5), Bounds(24.0, 10.5)))

    assert detail_tables(made)[0].notes[-1] == ""
    note = detail_tables(replace(made, goodputs=(short,)))[0].notes[-1]
    assert note.startswith("Above the sustainable rate: ours. Only so short a trace allows that")


def test_a_narrow_terminal_gets_fewer_columns_and_whole_cells_at_any_width() -> None:
    for table in detail_tables(outcome()):
        width = 399
        assert len(rich_table(table, width).columns) == len(table.columns)
        assert "first" in [column.header for column in rich_table(table, 80).columns]
        while width >= 80:
            shown = rich_table(table, width)
            narrowest = max(80, Console(width=1 << 16).measure(shown).maximum)
            at_narrowest = rich_table(table, narrowest)
            assert len(at_narrowest.columns) == len(shown.columns), "none is left out while there is room"
            console = Console(width=narrowest)
            with console.capture() as capture:
                console.print(at_narrowest)
            assert "…" not in capture.get(), narrowest
            width = narrowest - 1
    assert len(shown.columns) < len(table.columns)


def test_the_markdown_holds_every_table_and_what_the_variants_are() -> None:
    text = render_markdown(outcome())

    assert "| ours | `policy=dualmap`, `max_hold_s=60.0` |" in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## Summary", *(f"## {table.title}" for table in detail_tables(outcome()))]
    assert "| peer | 10.00 ± 0.00 | 46% | 0/2 |" in text
