"""No constructor takes many values by position, where two of them could be swapped unseen."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import dualmap

MOST_BY_POSITION = 7
ROOT = Path(dualmap.__file__).parent


def classes() -> Iterator[type]:
    """Every class of the product."""
    for found in pkgutil.walk_packages(dualmap.__path__, "dualmap."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            yield from (each for each in vars(module).values() if _is_own(each, found.name))


def _is_own(found: object, module: str) -> bool:
    return inspect.isclass(found) and found.__module__ == module


def by_position(cls: type) -> int:
    """How many values the constructor takes by position; 0 where it has no signature, as that of some bases."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (ValueError, TypeError):
        return 0
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in placed for each in parameters)


def test_no_constructor_takes_more_than_seven_values_by_position() -> None:
    wide = {cls: by_position(cls) for cls in classes() if not issubclass(cls, tuple)}

    assert {f"{cls.__module__}.{cls.__name__}": count for cls, count in wide.items() if count > MOST_BY_POSITION} == {}
    assert len(wide) > 1000


def test_no_call_gives_a_tuple_more_than_seven_values_by_position() -> None:
    """The fields of a named tuple always have a position; what matters is how it is made."""
    wide = {cls.__name__ for cls in classes() if issubclass(cls, tuple) and by_position(cls) > MOST_BY_POSITION}

    assert wide, "no named tuple has so many fields: this test has lost its subject"
    assert [f"{path}:{line}" for path, line in calls_by_position(wide)] == []


def calls_by_position(names: set[str]) -> Iterator[tuple[Path, int]]:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) > MOST_BY_POSITION and _name(node.func) in names:
                yield path, node.lineno


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
