"""Least squares without negative coefficients, for fits of step costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_LEAST: Final = 1e-12


def non_negative(
    rows: Sequence[Sequence[float]], values: Sequence[float], scales: Sequence[float] | None = None
) -> list[float]:
    """Coefficients of 0 or more with the least squared error, each row's over its scale (its value by default). Those
    that would be negative are left out one by one, the most negative first."""
    weights = [1.0 / max(_LEAST, abs(scale)) for scale in scales or values]
    kept = list(range(len(rows[0])))
    while kept:
        left = [[row[column] * weight for column in kept] for row, weight in zip(rows, weights, strict=True)]
        right = [value * weight for value, weight in zip(values, weights, strict=True)]
        solved = _least_squares(left, right)
        if min(solved) >= 0:
            by_column = dict(zip(kept, solved, strict=True))
            return [by_column.get(column, 0.0) for column in range(len(rows[0]))]
        del kept[solved.index(min(solved))]
    return [0.0] * len(rows[0])


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Solve the normal equations, each column scaled to its size; columns that say nothing get 0."""
    width = len(rows[0])
    sizes = [max(_LEAST, max(abs(row[column]) for row in rows)) for column in range(width)]
    scaled = [[row[column] / sizes[column] for column in range(width)] for row in rows]
    matrix = [[sum(row[a] * row[b] for row in scaled) for b in range(width)] for a in range(width)]
    target = [sum(row[a] * value for row, value in zip(scaled, values, strict=True)) for a in range(width)]
    solved = _solve(matrix, target)
    return [found / size for found, size in zip(solved, sizes, strict=True)]


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gaussian elimination with pivots."""
    size = len(target)
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        if abs(rows[column][column]) < 1e-13:
            rows[column] = [0.0] * size + [0.0]
            rows[column][column] = 1.0
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [mine - factor * other for mine, other in zip(rows[row], rows[column], strict=True)]
    return [rows[place][size] / rows[place][place] for place in range(size)]
