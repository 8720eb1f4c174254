"""Ports are asked in the background, and answers kept for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dualmap.router.http.deadlines import DeadlineChecks
from dualmap.router.http.port_checks import PortChecks
from dualmap.router.http.upstream_pool import UpstreamPool
from tests.router.http import kit
from tests.router.http.kit import StartInstance


@pytest.fixture
def checks() -> Iterator[PortChecks]:
    checks = PortChecks(UpstreamPool(DeadlineChecks(0.02), connect_timeout_s=2.0, idle_s=60.0, max_idle=2))
    yield checks
    checks.close()


async def test_a_port_that_nobody_listens_on_refuses(checks: Any, start_instance: StartInstance) -> None:
    instance = await start_instance(None)
    assert not checks.refuses(instance.url), "unknown at first"
    await kit.eventually(lambda: instance.connections == 1 and not checks._under_way)
    assert not checks.refuses(instance.url) and instance.connections == 1, "it was just asked"
    await kit.eventually(lambda: instance.open == 0)

    instance.close_port()
    await kit.eventually(lambda: checks.refuses(instance.url))


async def test_answers_that_are_out_of_date_are_dropped(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap.router.http.port_checks.FRESH_S", 0.0)
    for port in (1, 2, 3):
        checks.refuses(f"http://127.0.0.1:{port}")
        await kit.eventually(lambda: not checks._under_way)
    assert len(checks._found) == 1


async def test_a_check_that_is_under_way_ends_with_its_owner(checks: Any) -> None:
    checks.refuses("http://127.0.0.1:1")
    checks.close()
    await kit.eventually(lambda: not checks._under_way)
