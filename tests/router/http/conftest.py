"""The data plane between scripted instances and raw clients, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from dualmap.router.http import build_data_plane, http_protocol
from dualmap.router.relay.relay import NATIVE
from dualmap.router.settings import RouterSettings
from tests.router.http.kit import Instance, Intake, Router, Script, StartInstance, StartRouter, eventually, tiny_app


class RelayLoop(uvloop.Loop):
    """On this one streams pass the native relay."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both event loops: they differ where it matters here (end of file, aborts, write buffers). A third one has
    the native relay, where it is built: answers must be the same with it."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "uvloop": uvloop.new_event_loop,
    }
    compares = item.path.stem == "test_relayed_answer"  # it turns the relay on and off itself
    if NATIVE is not None and not compares and "start_router" in getattr(item, "fixturenames", ()):
        loops["relay"] = RelayLoop
    return loops


@pytest.fixture
async def start_instance() -> AsyncIterator[StartInstance]:
    """Start a scripted instance on a free port."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(script: Script, *, tls: ssl.SSLContext | None = None) -> Instance:
            instance = Instance(script)
            tasks: set[asyncio.Task[None]] = set()

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.ensure_future(instance.serve(reader, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

            async def stop() -> None:
                server.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

            server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
            instance.stop = stop
            instance.close_port = server.close
            stack.push_async_callback(stop)
            instance.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return instance

        yield start


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    """Serve the data plane over a life cycle; keyword arguments are router settings. Unless they say otherwise, streams
    pass as they come: nothing is kept of them, and nothing asked for."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            intake: Intake,
            *,
            app: Any = tiny_app,
            draining: Any = lambda: False,
            tls: Any = None,
            trust: Any = None,
            tenants: Any = None,
            memory_bytes: int = 2 << 30,
            **settings: Any,
        ) -> Router:
            settings.setdefault("continue_streams", "off")
            settings.setdefault("native_relay", isinstance(asyncio.get_running_loop(), RelayLoop))
            plane = build_data_plane(
                RouterSettings(**settings),
                intake,
                trust=trust,
                draining=draining,
                tenants=tenants,
                memory_bytes=memory_bytes,
            )
            config = uvicorn.Config(app, http=http_protocol(plane), lifespan="off", proxy_headers=False)
            config.load()
            state = ServerState()
            server = await asyncio.get_running_loop().create_server(
                lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),  # type: ignore[call-arg]
                "127.0.0.1",
                0,
                ssl=tls,
            )

            router = Router(plane, state, server.sockets[0].getsockname()[1])

            async def stop() -> None:
                server.close()
                for client in router.clients:
                    client.reset()
                await eventually(lambda: not state.connections and not state.tasks)
                assert plane.bodies.held_bytes == 0, "a body was not released"
                plane.close()
                assert len(plane.deadlines) == 0, "something is still registered for deadline checks"

            stack.push_async_callback(stop)
            return router

        yield start
