"""Fixtures of every room: a real Valkey for the whole session, empty for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from statestore.embedded import EmbeddedValkey


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EmbeddedValkey]:
    """A private server shared by the session; tests that stop or stall a server start their own."""
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
def valkey_url(valkey_server: EmbeddedValkey) -> str:
    """URL of a real, empty Valkey server."""
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
    return valkey_server.url
