"""One fleet for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet_process import Fleet, running_fleet
from openai import OpenAI

# Short leases, so that what follows a crash is seen soon.
QUICK = (
    "--router.replica_lease_s", "1.5", "--worker.lease_ms", "800",
    "--worker.health_interval_s", "0.3", "--status-interval-s", "0.2", "--emulator.store_responses", "true",
)  # fmt: skip


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), QUICK) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fleet.endpoint}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
