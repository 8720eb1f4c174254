"""Fixtures of every room: a real Valkey for the whole session, empty for each test, and a shortage of open files."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from dualmap.runtime.collector import uncollected
from dualmap.statestore.embedded import EmbeddedValkey
from tests.support.store_servers import StoreServers

# A slow machine fails no property.
settings.register_profile("dualmap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dualmap")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and collected tests live until the session ends, so the garbage collector leaves them alone: it took a
    third of the time in which they are made, and each of its full collections in a test walked all of them."""
    with uncollected():
        result = yield
    gc.freeze()
    gc.collect()  # counts what is left, as in settle_collector
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two processes more than there are processors: tests of fleets, faults and time limits wait for a third of their
    time, and others compute meanwhile."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.fixture(scope="session")
def store_servers() -> Iterator[StoreServers]:
    """The store's servers of every kind, shared by the session; tests that stop or stall a server start their own."""
    with StoreServers() as servers:
        yield servers


@pytest.fixture
def valkey_server(store_servers: StoreServers) -> EmbeddedValkey:
    return store_servers.running("valkey")


@pytest.fixture
def valkey_url(store_servers: StoreServers) -> str:
    """The URL of a real, empty Valkey server."""
    return store_servers.emptied("valkey")


@pytest.fixture
def no_files_left() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """``with no_files_left():`` this process can open none. The limit is the first number that is free: the threads of
    this process may go on, which could not wait for anything (poll(2), EINVAL) below a limit of 0."""

    @contextlib.contextmanager
    def shortage() -> Iterator[None]:
        former = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, former[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, former)

    return shortage
