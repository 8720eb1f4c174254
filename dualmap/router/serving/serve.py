"""One router replica as a process: bound ports, an open store, a server that drains at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import uvicorn
from prometheus_client import disable_created_metrics

from dualmap.router.admin.exposure import require_closed_admin
from dualmap.router.batches.runner import BatchRunner
from dualmap.router.batches.service import open_batches
from dualmap.router.errors import RouterError, ShuttingDownError
from dualmap.router.http import ClientConnection, DataPlane, build_data_plane, http_protocol
from dualmap.router.relay.relay import NATIVE
from dualmap.router.replica.runtime import Runtime
from dualmap.router.serving.app import create_app
from dualmap.router.serving.listeners import advertised_url, bind, port_of
from dualmap.router.serving.starting import EmbeddedServer, until_store_is_there
from dualmap.router.settings import CUT_OFF_S, RouterSettings
from dualmap.router.ui.chronicler import Chronicler
from dualmap.runtime.certificates import RenewedContext
from dualmap.runtime.collector import settle_collector
from dualmap.runtime.machine import memory_bytes
from dualmap.runtime.open_files import raise_open_files_limit
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import TenantSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.batches.batch_book import BatchBook
from dualmap.statestore.connect import open_store
from dualmap.statestore.port import ReplicaStore
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.url import parse_store_url, without_password

log = logging.getLogger(__name__)

BACKLOG = 2048

OTHER_FILES = 256
"""Open files other than those of requests: the store, probes and scrapes, idle connections, the process's own."""

YOUNG_OBJECTS = 5_000
"""Objects that are new at a collection. Requests under way have some hundred each, and free them as they end: collected
more often, they would be looked at, and taken for old, while they are in use."""
MIDDLE_COLLECTIONS = 2
"""Collections of the middle generation between two of all objects: few are old, as those of the start are frozen."""

OnReady = Callable[[int, int | None], None]
"""``on_ready(port, ops_port)``, once requests are served."""

T = TypeVar("T")


class Door(Protocol):
    """Another way in for requests than HTTP, which is for operation alone where there is one."""

    async def start(self) -> int:
        """Take requests; returns the port. Raises OSError where it cannot be listened on."""

    async def stop(self, within_s: float, hurried: asyncio.Event) -> None:
        """Take no more, let those in flight finish within this time, or until ``hurried``, and cut off the others."""

    async def close(self) -> None:
        """The process ends."""


MakeDoor = Callable[[Runtime, DataPlane], Door]


class Wait(Protocol):
    """``until_store_is_there``, for this process."""

    async def __call__(self, step: Callable[[], Awaitable[T]]) -> T | None: ...


async def serve(
    router: RouterSettings,
    scheduling: SchedulingSettings,
    store: StoreSettings,
    pools: Sequence[PoolSettings],
    *,
    tenants: Sequence[TenantSettings] = (),
    trust: InstanceTrust | None = None,
    replica_id: str | None = None,
    on_ready: OnReady | None = None,
    stop: asyncio.Event | None = None,
    door: MakeDoor | None = None,
    door_port: int | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or ``stop``; then drain: /ready turns off, the settle time passes, the port
    closes, requests in flight finish or are cut off at the drain timeout, the outbox is delivered to the store.

    A second signal ends it at once. A store that is not there yet is waited for, and /health answers meanwhile;
    configured instances enter as ``starting``, and their health checks make them ready.

    With a ``door`` requests come there, and ``on_ready`` is called with its port and the HTTP port. ``door_port`` is
    the port that others are told of.

    Raises:
        OSError: an address cannot be listened on.
        CertificateError: a file of the endpoint's TLS cannot be used.
        OpenAdminError: clients need keys, and administration, which they reach, needs none.
        StoreConfigurationError: the store's URL or server cannot serve a fleet; so cannot a store of one process.
        DuplicateModelError: two pools claim one model name.
    """
    # Created metrics are disabled: otherwise every counter has a second series, with an unused time.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every single prompt that an instance tokenizes
    require_closed_admin(router, tenants)
    _warn_of_few_files(router, raise_open_files_limit())
    _warn_of_tls(router)
    shutdown = _Shutdown(stop or asyncio.Event())
    followed = None if router.tls is None else router.tls.followed()
    tls = None if followed is None else RenewedContext(followed)
    with _listening(router, shared=door is None) as listeners, shutdown.handling_signals():
        wait = partial(
            until_store_is_there,
            url=without_password(store.url),
            stopping=shutdown.stopping,
            listener=listeners[-1],
            tls=tls if len(listeners) == 1 else None,
        )
        async with _opened(store, scheduling, wait) as opened:
            if opened is not None:
                info = await asyncio.to_thread(_info, router, listeners, store.url)
                if door_port is not None:
                    info["port"] = str(door_port)
                runtime = Runtime(
                    router, scheduling, opened, pools,
                    trust=trust, replica_id=replica_id, info=info, pairs_legs=door is not None, tenants=tenants,
                )  # fmt: skip
                runtime.certificates += [followed] if followed is not None else []
                await _serve(runtime, opened.batches, listeners, tls, shutdown, wait, on_ready, door)


async def _serve(
    runtime: Runtime,
    book: BatchBook,
    listeners: Sequence[socket.socket],
    tls: ssl.SSLContext | None,
    shutdown: _Shutdown,
    wait: Wait,
    on_ready: OnReady | None,
    make_door: MakeDoor | None,
) -> None:
    settings = runtime.context.settings
    plane = build_data_plane(
        settings,
        runtime.intake,
        tenants=runtime.tenants,
        trust=runtime.trust,
        metrics=runtime.context.metrics,
        draining=lambda: runtime.context.draining,
        memory_bytes=memory_bytes(),
    )
    batches = open_batches(settings.batches, book, forbidden_paths=settings.forbidden_paths)
    door = make_door(runtime, plane) if make_door is not None else None
    ports = [port_of(listener) for listener in listeners]
    config = uvicorn.Config(
        cast(Any, create_app(runtime, batches)),
        http=cast(Any, http_protocol(plane, ops_port=ports[1] if len(ports) > 1 else None, inference=door is None)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + CUT_OFF_S),
    )
    try:
        await wait(runtime.start)
        if not runtime.joined:
            return  # the process was stopped before the store answered
        runtime.keep_running("chronicle", Chronicler(runtime).run)
        if batches is not None:
            runtime.keep_running("batches", BatchRunner(runtime, plane, batches).run)
        if door is not None:
            ports = [await door.start(), *ports]
        servers = [_Server(config, tls if listener is listeners[0] else None) for listener in listeners]
        tasks = [
            asyncio.create_task(server.serve(sockets=[listener]), name=f"port {port}")
            for server, listener, port in zip(servers, listeners, map(port_of, listeners), strict=True)
        ]
        tasks.append(asyncio.create_task(_drain(runtime, servers, shutdown, door), name="drain"))
        try:
            starting = asyncio.gather(*(server.started_once.wait() for server in servers))
            begun: list[asyncio.Future[Any]] = [starting, *tasks[:-1]]
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                _announce(runtime, ports, on_ready)
            starting.cancel()
            await tasks[0]
            # The replica's own port stays open while requests drain: who checks there can tell a replica that drains
            # from one that is gone.
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*tasks[1:-1])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await runtime.stop()
        if door is not None:
            await door.close()
        plane.close()


async def _drain(runtime: Runtime, servers: Sequence[_Server], shutdown: _Shutdown, door: Door | None) -> None:
    """Turn /ready off, give load balancers the settle time to notice, let the endpoint's server shut down, and end with
    an error what has not finished within the drain timeout."""
    await shutdown.stopping.wait()
    runtime.context.draining = True
    settings = runtime.context.settings
    log.info("draining: /ready is off, the port closes in %g s", settings.settle_s)
    await shutdown.hurried_within(settings.settle_s)
    if door is not None:
        await door.stop(settings.drain_timeout_s, shutdown.hurried)
    servers[0].should_exit = True
    hurried = await shutdown.hurried_within(settings.drain_timeout_s)
    why = "a second signal came" if hurried else f"router.drain_timeout_s ({settings.drain_timeout_s:g} s) is over"
    error = ShuttingDownError(f"this replica shuts down, and {why}; try again", retry_after_s=1.0)
    cut = sum(server.cut_off(error) for server in servers)
    if cut:
        log.warning("cut off requests=%d: they had not finished, and %s", cut, why)
    await shutdown.hurried.wait()
    for server in servers:
        server.force_exit = True


def _announce(runtime: Runtime, ports: Sequence[int], on_ready: OnReady | None) -> None:
    settle_collector()
    _, young_collections, _ = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, young_collections, MIDDLE_COLLECTIONS)
    log.info("replica %s serves on port %s", runtime.context.replica_id, " and ".join(map(str, ports)))
    if on_ready is not None:
        on_ready(ports[0], ports[1] if len(ports) > 1 else None)


class _Server(EmbeddedServer):
    """The server of one port."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config, tls)
        self.started_once = asyncio.Event()

    def cut_off(self, error: RouterError) -> int:
        """End every request with ``error``; returns how many there were."""
        connections = cast("set[ClientConnection]", self.server_state.connections)
        return sum(connection.cut_off(error) for connection in tuple(connections))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_once.set()


class _Shutdown:
    """Whether the process got a signal to stop, and a second one to hurry."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self.stopping = stopping
        self.hurried = asyncio.Event()

    async def hurried_within(self, time_s: float) -> bool:
        """Wait for that long, or until a signal to hurry; returns whether there was one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(time_s):
                await self.hurried.wait()
        return self.hurried.is_set()

    def _on_signal(self) -> None:
        (self.hurried if self.stopping.is_set() else self.stopping).set()

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop; the next one hurries. Only the main thread can hear them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for each in signals:
            loop.add_signal_handler(each, self._on_signal)
        try:
            yield
        finally:
            for each in signals:
                loop.remove_signal_handler(each)


@contextlib.contextmanager
def _listening(router: RouterSettings, *, shared: bool) -> Iterator[list[socket.socket]]:
    """The bound sockets: the endpoint's, and this replica's own one when it is wanted."""
    listeners: list[socket.socket] = []
    try:
        listeners.append(bind(router.host, router.port, shared=shared))
        if router.ops_port is not None:
            listeners.append(bind(router.host, router.ops_port, shared=False))
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


@contextlib.asynccontextmanager
async def _opened(
    store: StoreSettings, scheduling: SchedulingSettings, wait: Wait
) -> AsyncIterator[ReplicaStore | None]:
    """The open store, closed at the end; None if the process got a signal to stop before it could be opened."""
    opened = await wait(lambda: open_store(store, scheduling=scheduling, shared=True))
    try:
        yield opened
    finally:
        if opened is not None:
            await opened.close()


def _warn_of_tls(router: RouterSettings) -> None:
    if router.tls is None:
        return
    if router.ops_port is None and not (router.advertise_url or "").startswith("https:"):
        log.warning(
            "probes, scrapes and the other replicas call this one by TLS at router.port, and must trust its"
            " certificate: set router.ops_port, which serves them plain HTTP, or router.advertise_url to an https://"
            " URL that its certificate names"
        )
    required = router.tls_client_required_for if router.tls_client_ca is not None else ()
    if router.ops_port is not None and router.admin_is_open and ("connections" in required or "admin" in required):
        log.warning("/admin needs no client certificate at router.ops_port: set router.admin_key or router.admins")


def _warn_of_few_files(router: RouterSettings, open_files: int) -> None:
    """A request holds two: the client's connection and the instance's."""
    wanted = 2 * router.max_connections + OTHER_FILES
    if 0 <= open_files < wanted:  # below 0 there is no limit
        log.warning(
            "this process may open %d files, and router.max_connections (%d) may take %d: allow so many"
            " (LimitNOFILE= in systemd, ulimits: nofile in compose), or lower router.max_connections",
            open_files, router.max_connections, wanted,
        )  # fmt: skip


def _info(router: RouterSettings, listeners: Sequence[socket.socket], store_url: str) -> dict[str, str]:
    """The information that this replica advertises to the fleet: the address of its own port if it has one, else of the
    endpoint; and the endpoint's port, which others on its machine may share."""
    towards = parse_store_url(store_url).nodes
    by_tls = router.tls is not None and len(listeners) == 1
    ops_url = router.advertise_url or advertised_url(router.host, port_of(listeners[-1]), towards, tls=by_tls)
    port = str(port_of(listeners[0]))
    relay = "off" if not router.native_relay else "native" if NATIVE is not None else "not built"
    return {"ops_url": ops_url, "port": port, "pid": str(os.getpid()), "host": socket.gethostname(), "relay": relay}
