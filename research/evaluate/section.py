"""What an experiment hands to the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Cell = str | float | int


def cell_of(figure: float | None) -> Cell:
    return "-" if figure is None else figure


@dataclass(frozen=True, slots=True)
class DataTable:
    """A table of the report; floats are shown with three digits, or as the column's name says (``%``)."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Section:
    """One experiment's part of the report."""

    name: str
    """Its key in the JSON."""
    title: str
    question: str
    """What the paper claims or asks here, and what was run."""
    findings: Sequence[str] = ()
    """What came out, computed from the figures: losses are named like wins."""
    tables: Sequence[DataTable] = ()
    plots: Sequence[Plot] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    """The figures for the JSON, where the tables do not hold them all."""
