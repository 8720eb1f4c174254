from __future__ import annotations

import shlex
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dualmap.runtime import extras
from dualmap.runtime.extras import how_to_install, packages_of

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]


def not_installed(name: str) -> list[str]:
    raise PackageNotFoundError(name)


def test_the_package_is_known_by_its_name() -> None:
    assert PROJECT["name"] == extras.DISTRIBUTION


@pytest.mark.parametrize("extra", OPTIONAL)
def test_an_extra_is_installed_by_its_packages_since_no_index_has_the_project(extra: str) -> None:
    python, *words = shlex.split(how_to_install(extra))

    assert python == sys.executable
    assert words[:3] == ["-m", "pip", "install"]
    assert {*map(Requirement, words[3:])} == {*map(Requirement, OPTIONAL[extra])}


def test_an_environment_without_pip_is_an_image_that_is_built_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)

    assert "--build-arg EXTRAS=tokens" in how_to_install("tokens")
    assert "transformers" in how_to_install("tokens")


def test_a_checkout_that_is_not_installed_names_its_own_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "requires", not_installed)

    assert packages_of("tokens") == []
    assert how_to_install("tokens") == "in a checkout, .venv/bin/pip install -e '.[tokens]'"


def test_the_test_extra_brings_what_the_others_have() -> None:
    """But for measured kernels, of 82 MB with as much again below them: what needs them is skipped, and says so."""
    brought = OPTIONAL.keys() - {"test", "silicon"}

    assert {package for name in brought for package in OPTIONAL[name]} <= set(OPTIONAL["test"])
