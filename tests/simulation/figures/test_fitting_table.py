import pytest
from rich.console import Console

from dualmap.simulation.commands.tables import COLUMNS, results_table
from dualmap.simulation.figures.fitting_table import fitting_table
from dualmap.simulation.figures.results import RequestOutcome, RunRecord, RunResult, summarize


def result(policy: str, ttft_s: float) -> RunResult:
    outcome = RequestOutcome(0.0, input_tokens=1000, output_tokens=11, slo_s=5.0, expected_ttft_s=1.0)
    outcome.first_token_s, outcome.finish_s = ttft_s, ttft_s + 100
    return summarize(
        RunRecord(
            policy=policy, trace="t", instances=2, rate_per_s=1.0, outcomes=[outcome], samples=(),
            infinite_cached_tokens=[500], migrations=12_345, preemptions=999, skip_requests=0,
        )
    )  # fmt: skip


RESULTS = [result("dualmap-cache-affinity", 1234.5), result("llm-d", 0.1)]


def printed(width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(results_table(RESULTS, width))
    return capture.get()


@pytest.mark.parametrize("width", range(80, 221))
def test_no_cell_is_cut_at_any_width(width: int) -> None:
    page = printed(width)

    assert "…" not in page
    assert "dualmap-cache-affinity" in page
    assert all(column in page for column in ("rate/s", "on time", "TTFT P50 s", "P90", "P99", "hit"))


def test_every_width_is_used_for_as_many_columns_as_fit() -> None:
    shown = [len(results_table(RESULTS, width).columns) for width in range(80, 221)]

    assert shown == sorted(shown)
    assert len(set(shown)) > 5
    assert shown[-1] == len(COLUMNS)


def test_what_always_stays_stays_and_so_does_the_first_column() -> None:
    headers = ("name", "much too long for it", "short", "last")

    table = fitting_table(headers, [("a", "b", "c", "d")], width=10, always=("last",))

    assert [column.header for column in table.columns] == ["name", "last"]
