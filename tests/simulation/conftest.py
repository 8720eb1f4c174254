"""Emulated servers on free ports, twenty times faster than the clock."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings

StartEmulator = Callable[..., Awaitable[EmulatedInstance]]
Condition = Callable[[], bool] | Callable[[], Awaitable[bool]]


@pytest.fixture
async def start_emulator() -> AsyncIterator[StartEmulator]:
    """Starts an emulated server with settings of the test's own; it is gone after the test."""
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> EmulatedInstance:
            settings = EmulatorSettings(**{"port": 0, "time_scale": 20.0, **changes})
            instances = await stack.enter_async_context(emulated_instances(settings))
            return instances[0]

        yield start


@pytest.fixture
async def emulator(start_emulator: StartEmulator) -> EmulatedInstance:
    return await start_emulator()


@pytest.fixture
def eventually() -> Callable[[Condition], Awaitable[None]]:
    """Waits until a condition holds, and fails if it does not within some seconds."""

    async def poll(condition: Condition) -> None:
        deadline_s = time.monotonic() + 60.0
        while True:
            holds = condition()
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return
            assert time.monotonic() < deadline_s, "the condition never came true"
            await asyncio.sleep(0.005)

    return poll
