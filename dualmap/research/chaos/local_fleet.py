"""A whole fleet on this machine that can be broken at every joint: each engine, each router, each worker and the store
is a process of its own, and the network in front of each engine and of the store is a ``FaultProxy``.

Routers and workers are those of ``dualmap up``, which restarts what dies as it does for users. The engines and the
store belong to this module, so that a fault can keep them dead for as long as it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from dualmap.research.chaos.fault_proxy import HOST, Concerns, FaultProxy
from dualmap.research.chaos.fleet_process import FleetProcess, unconfigured
from dualmap.research.chaos.proc import owns_connection
from dualmap.research.chaos.store_clock import StoreClock
from dualmap.runtime.pool_settings import UpstreamSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.http_client import HttpClient, HttpClientError
from dualmap.statestore.call_values import PoolSnapshot
from dualmap.statestore.connect import Store, open_store
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.errors import StoreError
from dualmap.statestore.settings import StoreSettings

if TYPE_CHECKING:
    from dualmap.research.chaos.certificates import FleetCertificates

T = TypeVar("T")

ENGINES, REPLICAS, WORKERS = 3, 2, 2
READY_WITHIN_S = 90.0
LOOK_EVERY_S = 0.1
COUNTS = (
    "pending_tokens", "dispatched_tokens", "deferred_tokens", "context_tokens", "queued_requests", "running_requests",
)  # fmt: skip
"""Counts of an instance that are zero where no request is."""


class ChaosError(SimulationError):
    """The fleet could not be brought into the state that a run needs; the message says which."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The processes, and their settings.

    Args:
        config: settings of routers, workers and the emulator as plain data, as a settings file has them.
        parent_pipe: name of the environment variable by which a child process is given the pipe that it ends with.
    """

    config: Mapping[str, Any]
    parent_pipe: str
    model: str
    engines: int = ENGINES
    replicas: int = REPLICAS
    workers: int = WORKERS
    tls: bool = False
    """Endpoint, engines and store speak TLS, the latter two to clients with a certificate alone."""

    @property
    def pool(self) -> str:
        return str(self.config["pools"][0]["name"])


class Engine:
    """One emulated instance in a process of its own, behind a proxy. Its port stays the same over restarts."""

    def __init__(
        self, name: str, plan: FleetPlan, config: Path, log: Path, parent_pipe: int, proxy: FaultProxy
    ) -> None:
        self.name = name
        self.proxy = proxy
        self._plan = plan
        self._config = config
        self._log = log
        self._parent_pipe = parent_pipe
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """The URL that the fleet knows it by: the proxy's."""
        return f"http{'s' if self._plan.tls else ''}://{HOST}:{self.proxy.port}"

    @property
    def own_url(self) -> str:
        """The URL of the process itself, past the proxy."""
        return f"http://{HOST}:{self._port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, *options: str) -> None:
        """Start it, with these options beside the fleet's, and wait until it listens."""
        before = self._log.stat().st_size if self._log.exists() else 0
        command = [sys.executable, "-m", "dualmap", "emulate", "--config", str(self._config)]
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - as quick as any fork
                [*command, "--instances", "1", "--port", str(self._port), *options],
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env=unconfigured() | {self._plan.parent_pipe: str(self._parent_pipe)},
                pass_fds=(self._parent_pipe,),
                start_new_session=True,
            )
        said = await until(lambda: self._said_since(before), f"{self.name} listens", READY_WITHIN_S)
        self._port = int(said.rpartition(":")[2])
        self.proxy.target_port = self._port
        if not self.proxy.port:
            await self.proxy.start()

    def _said_since(self, before: int) -> str:
        with self._log.open("rb") as log:
            log.seek(before)
            text = log.read().decode(errors="replace")
        if not self.running:
            raise ChaosError(f"{self.name} ended at its start:\n{text}")
        return text.partition("serves ")[2].partition("\n")[0].strip()

    async def kill(self) -> None:
        """kill -9."""
        if self.running and self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        await self.proxy.target_ended()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal: SIGSTOP suspends it, SIGCONT resumes it, SIGTERM asks it to end."""
        if self.running and self._process is not None:
            self._process.send_signal(number)

    async def ended(self) -> None:
        """Wait for its end."""
        await until(lambda: not self.running, f"{self.name} ends", 30.0)
        await self.proxy.target_ended()

    async def order(self, path: str, order: Mapping[str, Any] | None = None) -> Any:
        """The answer of an engine to an order under ``/emulator/``, past the proxy; a question without ``order``.

        Raises HttpClientError: it does not answer."""
        pieces, client = bytearray(), HttpClient(self.own_url, connect_timeout_s=2.0)
        try:
            method, body = ("GET", b"") if order is None else ("POST", json.dumps(order).encode())
            async with asyncio.timeout(5.0):
                await client.request(method, f"/emulator/{path}", body, on_body=pieces.extend)
        except TimeoutError as error:
            raise HttpClientError(f"{self.name} does not answer /emulator/{path}") from error
        finally:
            client.close()
        return json.loads(bytes(pieces))

    async def close(self) -> None:
        await self.proxy.close()
        if self._process is not None:
            if self.running:
                self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class FleetView:
    """The fleet as its store and its routers describe it at one moment."""

    states: dict[str, InstanceState] = field(default_factory=dict)
    leader: str | None = None
    replicas: int = 0
    """Living replicas."""
    live_requests: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Sums over all instances of counts that are not zero."""
    store_states: dict[str, str] = field(default_factory=dict)
    """The state of the store as each router reports it, by name: ``ok``, ``local`` …; or ``away`` for a router that
    does not answer, and ``certificates`` for one that cannot use its own."""

    @property
    def ready(self) -> int:
        """Instances that are ready."""
        return sum(state is InstanceState.READY for state in self.states.values())


class LocalFleet:
    """Use as an asynchronous context manager. Everything is in ``directory``, which must exist.

    Raises:
        ChaosError: it does not come up.
    """

    def __init__(self, plan: FleetPlan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.store_clock = StoreClock(directory)
        self.valkey: EmbeddedValkey
        self.store_proxy = FaultProxy(0)
        self.engines: list[Engine] = []
        self.up: FleetProcess
        self.certificates: FleetCertificates
        """Set where the fleet speaks TLS."""
        self._pipe: tuple[int, int] = (0, 0)
        self._store: Store | None = None

    async def __aenter__(self) -> LocalFleet:
        self._pipe = os.pipe()
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _start(self) -> None:
        config, settings, tls, trusted = self.directory / "chaos.yaml", {**self.plan.config}, None, {}
        if self.plan.tls:
            self.certificates = certificates = _certificates(self.directory)
            settings |= {name: {**settings[name], **files} for name, files in certificates.settings().items()}
            tls, trusted = certificates.server(), {"SSL_CERT_FILE": str(certificates.authority)}
        config.touch(mode=0o600)
        config.write_text(json.dumps(settings), encoding="utf-8")
        await self.store_clock.build()
        await self.start_store()
        self.store_proxy = FaultProxy(self._store_port, tls=tls)
        await self.store_proxy.start()
        store_url = f"redis://{HOST}:{self.store_proxy.port}/0"
        if self.plan.tls:
            store_url = f"rediss://{HOST}:{self.store_proxy.port}/0{self.certificates.store_options()}"
        self.engines = [
            Engine(name, self.plan, config, self.directory / f"{name}.log", self._pipe[0], FaultProxy(0, tls=tls))
            for name in (f"instance-{number}" for number in range(1, self.plan.engines + 1))
        ]
        await asyncio.gather(*(engine.start() for engine in self.engines))
        urls = [word for engine in self.engines for word in ("--instance-url", engine.url)]
        self.up = FleetProcess.start(
            self.directory,
            ("--config", str(config), "--port", "0", "--replicas", str(self.plan.replicas),
             "--workers", str(self.plan.workers), "--model", self.plan.model,
             "--store.url", store_url,
             "--ready-within-s", str(int(READY_WITHIN_S)), *urls),
            {self.plan.parent_pipe: str(self._pipe[0]), **trusted},
            (self._pipe[0],),
        )  # fmt: skip
        await until(lambda: self.up.is_ready, "the fleet is ready", READY_WITHIN_S)
        await self.whole(READY_WITHIN_S)

    async def _close(self) -> None:
        if self._store is not None:
            await self._store.close()
        if hasattr(self, "up"):
            await asyncio.to_thread(_stopped, self.up)
        for engine in self.engines:
            await engine.close()
        await self.store_proxy.close()
        if hasattr(self, "valkey"):
            await asyncio.to_thread(self.valkey.stop)
        for descriptor in self._pipe:
            os.close(descriptor)

    # --- the store

    @property
    def _store_port(self) -> int:
        return int(self.valkey.url.rpartition(":")[2].partition("/")[0])

    async def start_store(self) -> None:
        """Start the store, empty; on its former port if it had one."""
        self.valkey = EmbeddedValkey(port=self.store_proxy.target_port or None, binary=self.store_clock.server)
        await asyncio.to_thread(self.valkey.start)

    async def kill_store(self) -> None:
        """kill -9, and all that it kept is lost."""
        os.kill(self.valkey.server_pid, signal.SIGKILL)
        await asyncio.to_thread(self.valkey.stop)
        await self.store_proxy.target_ended()

    async def store_command(self, *words: str | int) -> Any:
        """The store's answer to a command, past the proxy."""
        import redis.asyncio

        async with redis.asyncio.Redis.from_url(self.valkey.url, socket_timeout=5.0) as client:
            execute = cast(Callable[..., Awaitable[Any]], client.execute_command)
            return await execute(*words)

    def key(self, name: str) -> str:
        """The name of one of the pool's keys."""
        return f"{self.plan.config['store']['prefix']}:{{{self.plan.pool}}}:{name}"

    # --- looking

    def client(self) -> HttpClient:
        """A client of the fleet's endpoint, to be closed."""
        upstream = UpstreamSettings(ca_file=self.certificates.authority) if self.plan.tls else None
        return HttpClient(self.up.endpoint, trust=InstanceTrust(upstream))

    async def snapshot(self) -> PoolSnapshot:
        """The pool as the store has it, past the proxy. Raises StoreError."""
        if self._store is None:
            self._store = await open_store(StoreSettings(url=self.valkey.url), scheduling=SchedulingSettings())
        return await self._store.pool(self.plan.pool).snapshot()

    async def view(self) -> FleetView:
        """The fleet as it is now; what does not answer is missing in it."""
        view = FleetView(store_states=await self._store_states())
        try:
            snapshot = await self.snapshot()
        except StoreError:
            return view
        view.states = {spec.instance_id: spec.state for spec in snapshot.instances.values()}
        view.leader = snapshot.leader.owner if snapshot.leader is not None else None
        view.replicas = sum(each.is_alive(snapshot.now_ms) for each in snapshot.replicas)
        view.live_requests = len(snapshot.requests)
        for name in COUNTS:
            if total := sum(abs(getattr(load, name)) for load in snapshot.loads.values()):
                view.counts[name] = total
        return view

    async def _store_states(self) -> dict[str, str]:
        return dict(zip(self.routers, await asyncio.gather(*map(self._store_state, self.ops_urls())), strict=False))

    def ops_urls(self) -> list[str]:
        """Each router's own address, as the configuration of the running fleet names it."""
        return [self._ops_url(router) for router in self.routers]

    def _ops_url(self, router: str) -> str:
        command = Path(f"/proc/{self.up.pid(router)}/cmdline")
        with contextlib.suppress(OSError, ValueError):
            words = command.read_bytes().decode().replace("\0", " ").split()  # spaces divide those of a fork
            return f"http://{HOST}:{words[words.index('--router.ops_port') + 1]}"
        return f"http://{HOST}:1"  # it is being started again

    async def _store_state(self, ops_url: str) -> str:
        try:
            report = json.loads(await self.health_text(ops_url))
            if any(state["problem"] for state in report.get("certificates", {}).values()):
                return "certificates"
            return str(report["pools"][self.plan.pool]["store"]) if report["status"] != "starting" else "starting"
        except (ValueError, KeyError):
            return "away"

    async def health_text(self, ops_url: str) -> str:
        """A router's report of its health; empty where it gives none."""
        client = HttpClient(ops_url, connect_timeout_s=1.0)
        try:
            async with asyncio.timeout(1.0):
                return (await client.read("/health"))[1].decode()
        except (HttpClientError, TimeoutError):
            return ""
        finally:
            client.close()

    async def is_whole(self) -> bool:
        """Whether everything is back: each instance ready, each replica alive and with the store, one leader."""
        view = await self.view()
        return (
            view.ready == len(self.engines) == len(view.states)
            and view.replicas == self.plan.replicas
            and view.leader is not None
            and list(view.store_states.values()) == ["ok"] * self.plan.replicas
        )

    async def whole(self, within_s: float) -> float:
        """Wait until everything is back; seconds that took. Raises ChaosError with what is missing."""
        began_s = time.monotonic()
        try:
            await until_async(self.is_whole, "", within_s)
        except ChaosError:
            raise ChaosError(f"not whole within {within_s:g} s: {await self.view()}") from None
        return time.monotonic() - began_s

    # --- processes

    @property
    def routers(self) -> list[str]:
        return [f"router-{number}" for number in range(1, self.plan.replicas + 1)]

    @property
    def workers(self) -> list[str]:
        return [f"worker-{number}" for number in range(1, self.plan.workers + 1)]

    async def leader(self) -> str:
        """The name of the worker that leads, as its process is called."""

        async def leading() -> str | None:
            return (await self.view()).leader

        owner = await until_async(leading, "a worker leads", 30.0)
        return owner.rpartition("-")[0]

    def connections_of(self, names: Iterable[str]) -> Concerns:
        """Whether a connection belongs to one of these children as they run now, for a fault that is theirs alone."""
        pids = [self.up.pid(name) for name in names]
        return lambda port, to_port: owns_connection(pids, port, to_port)

    def logs(self, pattern: str = "*.log") -> str:
        """The logs of routers and workers."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.up.directory.glob(pattern)))


def _certificates(directory: Path) -> FleetCertificates:
    try:
        from dualmap.research.chaos.certificates import FleetCertificates
    except ImportError as error:
        raise ChaosError("faults of certificates need trustme: install the project's test extra") from error
    return FleetCertificates(directory)


def _stopped(up: FleetProcess) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):  # it was killed then
        up.stop()


async def until(probe: Callable[[], T | Literal[False] | None], what: str, within_s: float) -> T:
    """The first result of ``probe`` that is true. Raises ChaosError with ``what`` where none comes in time."""

    async def probed() -> T | Literal[False] | None:
        return probe()

    return await until_async(probed, what, within_s)


async def until_async(
    probe: Callable[[], Awaitable[T | Literal[False] | None]], what: str, within_s: float, *,
    every_s: float = LOOK_EVERY_S,
) -> T:  # fmt: skip
    """The first result of ``probe``, which waits itself, that is true. Raises ChaosError where none comes in time."""
    end_s = time.monotonic() + within_s
    while True:
        if found := await probe():
            return found
        if time.monotonic() > end_s:
            raise ChaosError(f"never within {within_s:g} s: {what}")
        await asyncio.sleep(every_s)
