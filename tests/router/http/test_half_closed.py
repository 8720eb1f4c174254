"""How often, and when, a client that closed its half is asked whether it is there."""

from __future__ import annotations

import asyncio

import pytest

from dualmap.router.http import half_closed
from dualmap.router.http.half_closed import PROBE_DELAYS_S, DepartureProbes
from tests.router.http import kit


async def test_a_client_is_asked_a_few_times_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_closed, "PROBE_DELAYS_S", (0.0, 0.001, 0.002))
    asked: list[int] = []
    DepartureProbes(asyncio.get_running_loop(), lambda: asked.append(1))
    await kit.eventually(lambda: len(asked) == 3)
    await asyncio.sleep(0.02)
    assert len(asked) == 3


async def test_probes_that_are_stopped_ask_no_more() -> None:
    asked: list[int] = []
    probes = DepartureProbes(asyncio.get_running_loop(), lambda: asked.append(1))
    probes.stop()
    await asyncio.sleep(PROBE_DELAYS_S[1] * 2)
    assert asked == []
