"""Back-pressure: a client that reads slowly, or not at all."""

from __future__ import annotations

import asyncio
import socket

from dualmap.scheduling.request.outcome import Outcome
from tests.router.http import kit
from tests.router.http.kit import StartInstance, StartRouter, Talk
from tests.router.http.phases.answers import StartFleet


async def test_a_slow_client_slows_the_instance_down(start_instance: StartInstance, start_router: StartRouter) -> None:
    sent, total = 0, 10_000_000

    async def flood(talk: Talk) -> None:
        nonlocal sent
        talk.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
        await talk.begin_stream()
        await talk.token("a")
        while sent < total:
            await talk.chunk(b"data: " + b"x" * 49_992 + b"\n\n")
            sent += 50_000
        await talk.end_stream()

    def is_held_back() -> bool:
        sources = [connection._source for connection in router.state.connections]
        return any(source is not None and source.paused for source in sources)

    instance = await start_instance(flood)
    intake = kit.Intake([instance.url])
    router = await start_router(intake)
    client = await router.connect()
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.chat(stream=True)
    await kit.eventually(is_held_back)
    assert sent < total, "the router took all of it"
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    got, tail = 0, b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        data = await asyncio.wait_for(client.reader.read(1 << 20), 60)
        got, tail = got + len(data), tail[-10:] + data
    assert got > total
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.COMPLETED)


async def test_a_client_that_stops_reading_for_good_is_dropped(fleet: StartFleet) -> None:
    gone = asyncio.Event()

    async def flood(talk: Talk) -> None:
        await talk.begin_stream()
        try:
            while True:
                await talk.chunk(b"data: " + b"x" * 100_000 + b"\n\n")
        finally:
            gone.set()

    intake, _, client = await fleet(flood, settings={"chunk_timeout_s": 0.3})
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.chat(stream=True)
    await asyncio.wait_for(gone.wait(), 60)
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.CLIENT_GONE)
    client.reset()
