from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dualmap import scheduling

ROOM = Path(scheduling.__file__).parent
ALLOWED = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "msgspec",
    "operator",
    "orjson",
    "posixpath",  # for names of paths: what looks at files is not imported
    "pydantic",
    "re",
    "scheduling",
    "statistics",
    "struct",
    "types",
    "typing",
    "urllib.parse",
    "xxhash",
}
"""Nothing that does I/O, reads a clock or hides randomness; nothing of the other packages."""


def imported_rooms(source: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("dualmap.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or "").removeprefix("dualmap."))
    return {name if name in ALLOWED else name.split(".")[0] for name in names}


@pytest.mark.parametrize("source", sorted(ROOM.rglob("*.py")), ids=lambda path: path.relative_to(ROOM).as_posix())
def test_the_core_imports_only_what_is_pure(source: Path) -> None:
    assert imported_rooms(source) <= ALLOWED


def test_of_posixpath_only_what_reads_no_file_is_imported() -> None:
    found = {
        alias.name
        for source in ROOM.rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "posixpath"
        for alias in node.names
    }

    assert found <= {"normpath"}
    assert not any("import posixpath" in source.read_text() for source in ROOM.rglob("*.py"))


@pytest.mark.parametrize("source", sorted(ROOM.rglob("*.py")), ids=lambda path: path.relative_to(ROOM).as_posix())
def test_the_core_uses_no_hash_that_differs_between_processes(source: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]

    assert "hash" not in [call.id for call in calls if isinstance(call, ast.Name)]
