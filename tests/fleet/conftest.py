"""One fleet for all tests that leave it as they found it, in the last files of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that share the fleet run last: it costs a third of a processor for as long as it lives, which is from its
    first test to the end of all tests."""
    shares = {item.path for item in items if "fleet" in getattr(item, "fixturenames", ()) and _is_shared(item)}
    items.sort(key=lambda item: item.path in shares)


def _is_shared(item: pytest.Item) -> bool:
    """Whether the test's fleet is the one below, and not one of its own module."""
    return item.path.parent == Path(__file__).parent and not hasattr(item.getparent(pytest.Module).obj, "fleet")


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), QUICK) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fleet.endpoint}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
