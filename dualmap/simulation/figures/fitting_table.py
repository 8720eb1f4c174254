"""Tables for a terminal, with as many columns as it has room for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

_UNBOUNDED = 1 << 16


def fitting_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, always: Collection[str] = ()
) -> Table:
    """The table without the columns that ``width`` characters have no room for, so that no cell is ever cut.

    The last column goes first; the first one and those in ``always`` stay at any width.
    """
    kept = list(range(len(columns)))
    measuring = Console(width=_UNBOUNDED)
    while True:
        table = _table([columns[index] for index in kept], [[row[index] for index in kept] for row in rows])
        spare = [index for index in kept[1:] if columns[index] not in always]
        if not spare or measuring.measure(table).maximum <= width:
            return table
        kept.remove(spare[-1])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
