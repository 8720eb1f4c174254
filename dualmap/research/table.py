"""Tables: rows of runs, columns of their figures; for a terminal, in Markdown, in HTML and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table as RichTable

from dualmap.research.figures import Figures
from dualmap.simulation.figures.fitting_table import fitting_table
from dualmap.simulation.figures.mean import Mean

Cell = str | float | int
ABSENT = "–"
"""Content of a cell for which there is no run."""


@dataclass(frozen=True, slots=True)
class Table:
    """A cell is a text, or a number that JSON holds in full and ``show`` writes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    """Sentences below the table."""


@dataclass(frozen=True, slots=True)
class Column:
    """One of ``Figures`` as a table has it."""

    title: str
    figure: str
    factor: float = 1
    digits: int = 0
    unit: str = ""
    highest_best: bool = True

    def number(self, figures: Figures) -> Cell:
        """The figure of one run, in full."""
        value: float | None = getattr(figures, self.figure)
        return "-" if value is None else self.factor * value

    def mean(self, seeds: Sequence[Figures]) -> str:
        return f"{self._mean(seeds).value:.{self.digits}f}"

    def spread(self, seeds: Sequence[Figures]) -> str:
        """The mean over the seeds with its interval."""
        return shown(self._mean(seeds), self.digits)

    def _mean(self, seeds: Sequence[Figures]) -> Mean:
        return Mean.of([self.factor * getattr(one, self.figure) for one in seeds])


def titles(columns: Sequence[Column]) -> tuple[str, ...]:
    return tuple(column.title for column in columns)


def shown(mean: Mean, digits: int, *, sign: bool = False) -> str:
    """A mean with its interval, if it has one."""
    value = f"{mean.value:{'+' if sign else ''}.{digits}f}"
    return f"{value} ± {mean.half_width:.{digits}f}" if len(mean.values) > 1 else value


def counted(seeds: int) -> str:
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def show(cell: Cell) -> str:
    """A number with about three digits, everything else as it is."""
    if not isinstance(cell, float):
        return str(cell)
    if cell == float("inf"):
        return "∞"
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:.2f}"


def text_rows(table: Table) -> list[list[str]]:
    return [[show(cell) for cell in row] for row in table.rows]


def rich_table(table: Table, width: int) -> RichTable:
    """The table for a terminal; a narrow one gets the columns that matter most (Markdown and JSON have all)."""
    return fitting_table(table.columns, text_rows(table), width, always=("first",))


def markdown_rows(table: Table, alignment: str = "---:") -> list[str]:
    """Lines; ``alignment`` as Markdown writes it, of all columns but the first."""
    lines = [f"| {' | '.join(table.columns)} |", f"| --- |{f' {alignment} |' * (len(table.columns) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in text_rows(table))]


def markdown_table(table: Table, heading: str, alignment: str) -> list[str]:
    """Lines, with the title behind ``heading`` and the notes below."""
    notes = (f"{note}  " for note in table.notes if note)
    return ["", f"{heading} {table.title}", "", *markdown_rows(table, alignment), "", *notes]


def html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in text_rows(table))
    summary = f"{escape(table.title)} ({len(table.rows)} rows)"
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes if note)
    return (
        f"<details{' open' if len(table.rows) <= 24 else ''}><summary>{summary}</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}</details>"
    )


def json_rows(table: Table) -> list[dict[str, Cell]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]
