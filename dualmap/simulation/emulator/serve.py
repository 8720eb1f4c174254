"""Running emulated servers: some inside a program (tests, a fleet on one machine), or a process of their own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from dualmap.runtime.open_files import raise_open_files_limit
from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.emulator.settings import EmulatorSettings


@asynccontextmanager
async def emulated_instances(settings: EmulatorSettings) -> AsyncIterator[Sequence[EmulatedInstance]]:
    """Serve instances for the time of the context.

    Raises:
        OSError: a port is taken; none stays open.
    """
    instances = [
        EmulatedInstance(settings, settings.port + offset if settings.port else 0)
        for offset in range(settings.instances)
    ]
    try:
        for instance in instances:
            await instance.open()
        yield instances
    finally:
        await asyncio.gather(*(instance.close() for instance in instances))


async def serve(settings: EmulatorSettings, *, on_ready: Callable[[Sequence[str]], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` gets the base URLs once all ports listen.

    Raises:
        OSError: a port is taken.
    """
    raise_open_files_limit()  # one per request
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        async with emulated_instances(settings) as instances:
            if on_ready is not None:
                on_ready([instance.url for instance in instances])
            await stopping.wait()
            await asyncio.gather(*(instance.shut_down() for instance in instances))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
