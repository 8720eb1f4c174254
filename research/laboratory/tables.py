"""Tables of the laboratory's report: their figures in words, their rows for a terminal and in Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from dualmap.research.laboratory.confidence import Mean
from dualmap.simulation.fitting_table import fitting_table


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A row a variant, or a row a fleet."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    """Sentences below the table."""


def shown(mean: Mean, digits: int, *, sign: bool = False) -> str:
    """A mean with its interval, if it has one."""
    value = f"{mean.value:{'+' if sign else ''}.{digits}f}"
    return f"{value} ± {mean.half_width:.{digits}f}" if len(mean.values) > 1 else value


def counted(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def rich_table(table: ReportTable, width: int) -> Table:
    """For a terminal; a narrow one gets the columns that matter most (Markdown and JSON have all)."""
    return fitting_table(table.columns, table.rows, width, always=("first",))


def markdown_table(table: ReportTable, heading: str, alignment: str) -> list[str]:
    """Lines; ``heading`` and ``alignment`` as Markdown writes them, the latter of all columns but the first."""
    lines = ["", f"{heading} {table.title}", "", f"| {' | '.join(table.columns)} |"]
    lines += [f"| --- |{f' {alignment} |' * (len(table.columns) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in table.rows]
    return [*lines, "", *(f"{note}  " for note in table.notes if note)]
