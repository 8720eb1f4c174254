"""One fleet for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), QUICK) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fleet.endpoint}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
