"""The emulator as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from tests.support.ports import ports_in_a_row

PROGRAM = """
import sys
import uvloop
from dualmap.simulation.emulator.serve import serve
from dualmap.simulation.emulator.settings import EmulatorSettings
settings = EmulatorSettings(port=0, instances=2, shutdown_timeout_s=float(sys.argv[1]))
uvloop.run(serve(settings, on_ready=lambda urls: print(*urls, flush=True)))
"""


@asynccontextmanager
async def emulator_process(shutdown_timeout_s: float) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(shutdown_timeout_s), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield process, line.decode().split()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def stream_of(client: httpx.AsyncClient, url: str, max_tokens: int) -> asyncio.Task[httpx.Response]:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens, "stream": True}
    return asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body))


async def is_busy(client: httpx.AsyncClient, url: str) -> bool:
    return bool((await client.get(f"{url}/load")).json()["server_load"])


async def test_sigterm_ends_streams_with_abort_and_the_process_with_0(
    eventually: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]],
) -> None:
    async with emulator_process(0.0) as (process, urls), httpx.AsyncClient(timeout=60) as client:
        assert len(set(urls)) == 2
        streaming = stream_of(client, urls[1], 100_000)
        await eventually(lambda: is_busy(client, urls[1]))
        process.send_signal(signal.SIGTERM)
        text = (await streaming).text
        assert '"finish_reason":"abort"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_with_a_shutdown_timeout_running_requests_finish_while_new_ones_fail(
    eventually: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]],
) -> None:
    async with emulator_process(15.0) as (process, urls), httpx.AsyncClient(timeout=60) as client:
        streaming = stream_of(client, urls[0], 40)
        await eventually(lambda: is_busy(client, urls[0]))
        process.send_signal(signal.SIGTERM)

        async def refuses_new_ones() -> bool:
            answer = await client.post(f"{urls[0]}/v1/completions", json={"prompt": "x", "max_tokens": 1})
            return answer.status_code == 500

        await eventually(refuses_new_ones)
        assert (await client.get(f"{urls[0]}/health")).status_code == 200
        assert '"finish_reason":"length"' in (await streaming).text
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_taken_port_leaves_nothing_open() -> None:
    # given two free ports in a row, the second of which is then taken
    first = ports_in_a_row(2)
    async with emulated_instances(EmulatorSettings(port=first + 1)):
        # when a process wants both
        with pytest.raises(OSError, match=str(first + 1)):
            async with emulated_instances(EmulatorSettings(port=first, instances=2)):
                pass
    # then the first is free again
    async with emulated_instances(EmulatorSettings(port=first, instances=2)) as both:
        assert len(both) == 2
