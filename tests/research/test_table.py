import pytest
from rich.console import Console

from dualmap.research.table import Column, Table, html_table, json_rows, markdown_rows, rich_table, show, titles
from tests.research.suites.samples import FIGURES

COLUMNS = (
    Column("on time %", "on_time", 100, 1),
    Column("TTFT P90 s", "ttft_p90_s", digits=2),
    Column("CV", "load_cv"),
)
TABLE = Table(
    "A < B", ("policy", *titles(COLUMNS)), [["dualmap", *(one.number(FIGURES) for one in COLUMNS)]], ["A note."]
)


@pytest.mark.parametrize(
    ("cell", "text"),
    [(3, "3"), ("a", "a"), (0.12345, "0.12"), (123.4, "123.4"), (12345.6, "12,346"), (float("inf"), "∞")],
)
def test_numbers_are_shown_with_the_digits_that_mean_something(cell: object, text: str) -> None:
    assert show(cell) == text


def test_a_column_tells_one_run_in_full_and_several_with_their_interval() -> None:
    on_time, ttft, cv = COLUMNS

    assert (on_time.number(FIGURES), ttft.number(FIGURES), cv.number(FIGURES)) == (90.0, 2.0, "-")
    assert (on_time.mean([FIGURES] * 2), ttft.spread([FIGURES] * 2)) == ("90.0", "2.00 ± 0.00")


def test_a_table_is_the_same_in_every_form() -> None:
    console = Console(width=100, record=True)
    console.print(rich_table(TABLE, 100))

    assert json_rows(TABLE) == [{"policy": "dualmap", "on time %": 90.0, "TTFT P90 s": 2.0, "CV": "-"}]
    assert markdown_rows(TABLE)[-1] == "| dualmap | 90.00 | 2.00 | - |"
    assert "<summary>A &lt; B (1 rows)</summary>" in html_table(TABLE)
    assert "<td>90.00</td><td>2.00</td>" in html_table(TABLE) and "A note." in html_table(TABLE)
    assert ["dualmap", "90.00", "2.00", "-"] in [line.split() for line in console.export_text().splitlines()]
