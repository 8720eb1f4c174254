"""A client for the emulated server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from simulation.emulator.instance import EmulatedInstance


@pytest.fixture
async def http(emulator: EmulatedInstance) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=emulator.url, timeout=10) as client:
        yield client
