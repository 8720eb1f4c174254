"""The public surface for authors of policies: listed, whole, and enough for the policies of the product."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dualmap import policies
from dualmap.scheduling.placing.policies import build_policy
from dualmap.scheduling.settings import POLICIES, SchedulingSettings

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*_policy/*.py"))


def test_every_public_name_is_listed_and_every_listed_name_exists() -> None:
    defined = {
        name for name, value in vars(policies).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }

    assert set(policies.__all__) == defined
    assert len(policies.__all__) == len(set(policies.__all__))


@pytest.mark.parametrize("base", [policies.PairPolicy, policies.FleetPolicy])
def test_what_an_author_must_write_is_public_and_says_what_it_is_for(base: type) -> None:
    abstract: frozenset[str] = getattr(base, "__abstractmethods__")  # noqa: B009

    assert abstract
    assert [name for name in abstract if name.startswith("_")] == []
    assert [name for name in abstract if not getattr(base, name).__doc__] == []


def overridden(policy: type) -> Iterator[str]:
    """Private names of a base that a class above it in its inheritance defines again."""
    classes = [each for each in policy.__mro__ if each is not object and each.__module__.partition(".")[0] != "abc"]
    for place, each in enumerate(classes):
        for base in classes[place + 1 :]:
            own = {name for name in vars(each).keys() & vars(base).keys() if name.startswith("_")}
            yield from (f"{each.__name__}.{name}" for name in own if not name.startswith(("__", "_abc_")))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_the_product_overrides_nothing_private(name: str) -> None:
    policy = build_policy(SchedulingSettings.model_validate({"policy": name}))

    assert list(overridden(type(policy))) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_uses_the_public_surface_alone(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("example_policy", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    imports = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    used = {
        f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if node.module
        if node.module.partition(".")[0] == "dualmap"
    }

    assert used
    assert used <= {f"dualmap.policies.{name}" for name in policies.__all__}
    built = example.build("own", SchedulingSettings())
    assert list(overridden(type(built))) == []


def test_a_private_method_that_is_overridden_is_found() -> None:
    class Base:
        def _part(self) -> int:
            return 1

    class Own(Base):
        def _part(self) -> int:
            return 2

    assert EXAMPLES
    assert list(overridden(Own)) == ["Own._part"]
