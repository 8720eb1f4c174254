"""The cost of one router replica: CPU per request and per streamed chunk, added latency, memory.

The router process is pinned to the last core; mock instance, load and store share the others. CPU is that of the router
process (all threads), read from the kernel around each load.

full    the product: scheduling on an embedded Valkey; streams may go on elsewhere, by their tokens
python  the same without the native relay
text    the same, by their text (router.continue_streams)
cut     the same, not at all: each ends with its instance
logged  the same with a request log
tenants the same where each request has the key of one of four tenants, with limits of four kinds, a share, and metering
sessions  the same where each request has the header of one of 64 sessions, which nothing needs
turns   the same where runs wait for memory and there is enough for all, without a header
runs    the same with a header
traced  the same with tracing of 1 % of the requests, exported to a receiver that accepts everything
traced10  the same with 10 %: what a sampled request costs
split   the same where each request has two legs: instances prefill or decode, and every prompt is transferred
plane   the data plane alone, over a life cycle that decides nothing
asking  the same, which waits for an empty reply of the store before it sends a request on: the least that any decision
        on shared state adds
relay   copies bytes without HTTP: the floor of this machine at this hour, to compare the others with

A mode with a checkout of another version behind it, as in ``full@/tmp/older``, runs the router of that version.

    python benchmarks/router_overhead.py [--modes full,logged,traced,plane,asking,relay] [--repetitions 3]
        [--requests 3000] [--tcp] [--rate 20] [--awake] [--streams 48:20,1000:33] [--profile DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import logging
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import orjson
import uvicorn
import uvloop
from pydantic import SecretStr
from redis.asyncio import ConnectionPool

from dualmap.router.errors import UpstreamError
from dualmap.router.http import build_data_plane, http_protocol
from dualmap.router.pool.instance_loss import InstanceLossNotifier
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.serving.serve import serve
from dualmap.router.settings import RouterSettings
from dualmap.runtime.clock import RealClock
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import LimitSettings, TenantKeySettings, TenantSettings
from dualmap.scheduling.request.charge import Counted
from dualmap.scheduling.request.machine import Failed, RequestSpec
from dualmap.scheduling.request.outcome import InstanceFailure, Outcome, Usage
from dualmap.scheduling.request.retry_budget import RetryBudget
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.statestore.connect import open_store
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.redis.wire import Wire, pack
from dualmap.statestore.settings import StoreSettings

CONNECTIONS = 16
BURST_CHUNKS = 1000
PACED_STREAMS = 20
PACED_CHUNKS = 100
PACE_S = 0.01
TRACED_SHARE = {"traced": 0.01, "traced10": 0.1}
KEYS = tuple(f"a-long-random-secret-{n}" for n in range(4))
SESSIONS = 64
CONTINUED = {"text": "text", "cut": "off"}
TOKEN = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
TOKEN_WITH_ID = TOKEN.replace(b'"finish_reason":null', b'"finish_reason":null,"token_ids":[12345]')
TOKEN = TOKEN.replace(b'"finish_reason":null', b'"finish_reason":null,"token_ids":null')
ANSWER = orjson.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 50}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 600, "completion_tokens": 50, "total_tokens": 650},
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [*range(5)], "remote_engine_id": "e"},
    }
)
MODELS = b'{"object":"list","data":[{"id":"default","object":"model","owned_by":"vllm","max_model_len":32768}]}'
ASKS_IDS = b'"return_token_ids":true'
PREFILL_LEG = b'"do_remote_decode":true'
SPLIT_ROLES = (Role.PREFILL, Role.DECODE)


def tenants() -> tuple[TenantSettings, ...]:
    """Tenants with limits of four kinds, which no request meets."""
    amount = 10**12
    limits = LimitSettings(
        requests_per_minute=amount, tokens_per_minute=amount, tokens_per_month=amount, requests_in_flight=amount
    )
    return tuple(
        TenantSettings(name=f"tenant-{n}", limits=limits, keys=(TenantKeySettings(name="main", key=SecretStr(key)),))
        for n, key in enumerate(KEYS)
    )


def key_of(mode: str, number: int) -> str | None:
    """The key that a request to a router of this mode has."""
    return KEYS[number % len(KEYS)] if mode.partition("@")[0] == "tenants" else None


def session_of(mode: str, number: int) -> str | None:
    """The session that the header of a request to a router of this mode names."""
    return f"session-{number % SESSIONS}" if mode.partition("@")[0] in ("sessions", "runs") else None


# the mock instance -----------------------------------------------------------------------------------------------
class MockInstance(asyncio.Protocol):
    """Answers at once; a text that begins with ``mock:CHUNKS,PACE_MS`` makes it stream, or the header ``x-mock``, which
    other projects' routers leave out."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            total = end + 4 + int(_field(head, b"content-length") or 0)
            if len(self._buffer) < total:
                return
            body, self._buffer = self._buffer[end:total], self._buffer[total:]
            if head.startswith(b"get "):
                self._page(MODELS if head.startswith(b"get /v1/models") else b"{}")
                continue
            token = TOKEN_WITH_ID if ASKS_IDS in body else TOKEN
            self._answer(None if PREFILL_LEG in body else _field(head, b"x-mock") or ordered_answer(body), token)

    def _page(self, page: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(page)
        self._transport.write(head + page)

    def _answer(self, mock: bytes | None, token: bytes) -> None:
        if mock is None:
            self._page(ANSWER)
            return
        chunks, pace_ms = map(int, mock.split(b","))
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head)
        self._tick(_chunk(token), chunks, pace_ms / 1000)

    def _tick(self, chunk: bytes, left: int, pace_s: float) -> None:
        if left == 0:
            self._end()
            return
        self._transport.write(chunk)
        # A stream without a pace takes an iteration of the event loop, and so a packet, per chunk.
        asyncio.get_running_loop().call_later(pace_s, self._tick, chunk, left - 1, pace_s)

    def _end(self) -> None:
        self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def ordered_answer(body: bytes) -> bytes | None:
    """The form of the answer that a text orders, if one does."""
    start = body.find(b'"mock:')
    return None if start < 0 else body[start + 6 : body.index(b" ", start + 6)]


def _field(head: bytes, name: bytes) -> bytes | None:
    start = head.find(b"\r\n" + name + b": ")
    if start < 0:
        return None
    start += len(name) + 4
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else None]


# the load --------------------------------------------------------------------------------------------------------
def request(
    prompt_bytes: int, seed: int, mock: str | None = None, key: str | None = None, session: str | None = None
) -> bytes:
    """A chat request whose system prompt it shares with one in eight others; with the key of a tenant, and a
    session."""
    rng = random.Random(seed)
    system = random.Random(seed % 8).randbytes(prompt_bytes // 4).hex()
    order = "" if mock is None else f"mock:{mock} "
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": order + rng.randbytes(max(8, prompt_bytes // 4 - 60)).hex()},
    ]
    body = orjson.dumps({"model": "default", "messages": messages, "stream": mock is not None, "max_tokens": 64})
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n"
    head += "" if key is None else f"authorization: Bearer {key}\r\n"
    head += "" if session is None else f"x-session-id: {session}\r\n"
    return head.encode() + b"\r\n" + body


class Client:
    """One keep-alive connection; an answer is complete at its last bytes, which are known."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, wire: bytes) -> float:
        """Seconds to the whole answer."""
        start_s = time.perf_counter()
        self._writer.write(wire)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head + await self._reader.read(400)
        length = _field(head.lower(), b"content-length")
        if length is not None:
            await self._reader.readexactly(int(length))
        else:
            await self._reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        return time.perf_counter() - start_s

    def close(self) -> None:
        self._writer.close()


async def connect(port: int, count: int) -> list[Client]:
    limit = 64 << 20
    return [Client(*await asyncio.open_connection("127.0.0.1", port, limit=limit)) for _ in range(count)]


async def closed_loop(port: int, wires: list[bytes], connections: int) -> None:
    """Every connection asks its next question when it has its answer."""
    waiting = iter(wires)

    async def work(client: Client) -> None:
        for wire in waiting:
            await client.ask(wire)
        client.close()

    await asyncio.gather(*[work(client) for client in await connect(port, connections)])


async def open_loop(port: int, wires: list[bytes], rate_per_s: float) -> list[float]:
    """Latencies in seconds at a steady rate."""
    clients = await connect(port, 4)
    latencies_s = []
    for n, wire in enumerate(wires):
        start_s = time.perf_counter()
        latencies_s.append(await clients[n % 4].ask(wire))
        await asyncio.sleep(max(0.0, 1 / rate_per_s - (time.perf_counter() - start_s)))
    for client in clients:
        client.close()
    return sorted(latencies_s)


class Stream(asyncio.Protocol):
    """A connection on which one streamed answer comes; notes when each read of it came."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.times_s: list[float] = []
        self._last = b""

    def data_received(self, data: bytes) -> None:
        self.times_s.append(time.perf_counter())
        self._last = (self._last + data)[-5:]
        if self._last == b"0\r\n\r\n":
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the stream broke"))

    def gaps_s(self) -> list[float]:
        """The time from each read to the next."""
        return [later - former for former, later in pairwise(self.times_s)]


@contextlib.asynccontextmanager
async def streams_begun(port: int, wires: Sequence[bytes], within_s: float) -> AsyncIterator[list[Stream]]:
    """Streams that begin evenly within this time; their connections are closed at the end."""
    loop = asyncio.get_running_loop()
    opened = []
    try:
        for wire in wires:
            opened.append(await loop.create_connection(Stream, "127.0.0.1", port))
            opened[-1][0].write(wire)
            await asyncio.sleep(within_s / len(wires))
        yield [stream for _, stream in opened]
    finally:
        for transport, _ in opened:
            transport.close()


async def paced_streams(router: Router, count: int, pace_ms: int, chunks: int, mode: str = "full") -> dict[str, float]:
    """CPU and memory of so many streams at once, and the gaps that their clients see."""
    rss_mb, wires = (
        router.rss_mb(),
        [request(256, number, f"{chunks},{pace_ms}", key_of(mode, number)) for number in range(count)],
    )
    async with streams_begun(router.port, wires, pace_ms / 1000) as streams:
        await asyncio.sleep(1.0)  # requests are over, streams flow
        begun_s, begun_cpu_s, seen = time.perf_counter(), router.cpu_s(), sum(len(each.times_s) for each in streams)
        await asyncio.sleep(chunks * pace_ms / 1000 / 2)
        took_s, flow_cpu_s = time.perf_counter() - begun_s, router.cpu_s() - begun_cpu_s
        passed, peak_mb = sum(len(each.times_s) for each in streams) - seen, router.rss_mb()
        await asyncio.gather(*[each.ended for each in streams])
    gaps = sorted(gap_s for each in streams for gap_s in each.gaps_s()[2:])
    name = f"{count}x{pace_ms}ms"
    return {
        f"us/chunk {name}": flow_cpu_s / max(1, passed) * 1e6,
        f"cores {name}": flow_cpu_s / took_s,
        f"chunks/s {name}": passed / took_s,
        f"KB/stream {name}": (peak_mb - rss_mb) * 1024 / count,
        f"gap P50 ms {name}": gaps[len(gaps) // 2] * 1000,
        f"gap P99 ms {name}": gaps[int(len(gaps) * 0.99)] * 1000,
    }


# the router process ----------------------------------------------------------------------------------------------
class BlindMachine:
    """The life of a request that is on its only instance from the start."""

    expected_ttft_s: float | None = None
    to_send = Leg.WHOLE
    tries = 1
    is_decoded = is_evictable = False
    max_load_tokens: int | None = None
    pulled_within_s: float | None = None
    source: None = None

    def __init__(self, request: InferenceRequest, target: InstanceSpec) -> None:
        self.request_id = request.request_id
        self.spec = RequestSpec(prompt_hash=0, chain=None, slo_s=1.0, model=request.model)
        self.instance_id = self.answering_id = target.instance_id
        self._target = target

    def instance_for(self, leg: Leg) -> InstanceSpec:
        return self._target


class BlindRequest:
    """A request placed without looking: the least a life cycle can cost."""

    expected_cached_tokens = 0
    abort_requested = False

    def __init__(self, request: InferenceRequest, target: InstanceSpec, pool: BlindPool) -> None:
        self.request_id, self.pool = request.request_id, pool
        self.machine = BlindMachine(request, target)
        self.on_evict: Callable[[str], None] | None = None

    def limit_fields(self) -> list[tuple[bytes, bytes]]:
        return []

    def sent(self) -> None: ...

    def first_token(self) -> None: ...

    async def prefill_ended(self) -> None: ...

    async def failed(self, event: Failed) -> None:
        raise UpstreamError(str(event.failure))

    def broke_off(self, failure: InstanceFailure) -> None: ...

    def finish(self, outcome: Outcome, usage: Usage | None = None, counted: Counted | None = None) -> None: ...


class BlindPool:
    def __init__(self) -> None:
        self.loss_notifier = InstanceLossNotifier(RetryBudget(0.0, 0.0, 0.0), RealClock())
        self.settings = PoolSettings()


class BlindIntake:
    def __init__(self, url: str) -> None:
        self._target, self._pool = InstanceSpec("instance-0", url), BlindPool()

    async def place(self, request: InferenceRequest) -> BlindRequest:
        return BlindRequest(request, self._target, self._pool)


class AskingIntake(BlindIntake):
    def __init__(self, url: str, wire: Wire) -> None:
        super().__init__(url)
        self._wire = wire

    async def place(self, request: InferenceRequest) -> BlindRequest:
        await self._wire.send(pack(("PING",)))
        return await super().place(request)


async def serve_plane(intake: BlindIntake, on_ready: Callable[[int, int | None], None]) -> None:
    plane = build_data_plane(RouterSettings(), intake)  # type: ignore[arg-type]
    config = uvicorn.Config(lambda *_: None, http=http_protocol(plane), lifespan="off", log_config=None)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    on_ready(listener.getsockname()[1], None)  # what connects before it is served waits in the backlog
    await uvicorn.Server(config).serve(sockets=[listener])


class Collector(BaseHTTPRequestHandler):
    """Accepts every export."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def start_collector() -> str:
    """The URL of the engine, which lives as long as this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1/traces"


class RelayUpstream(asyncio.Protocol):
    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)


class Relay(asyncio.Protocol):
    """A connection to the instance per connection of a client, and bytes copied: what the kernel and the event loop
    cost on this machine, at this hour. No product can be below it in Python."""

    def __init__(self, instance_url: str) -> None:
        parts = urlsplit(instance_url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._upstream: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connecting = asyncio.ensure_future(self._connect(cast(asyncio.Transport, transport)))

    async def _connect(self, client: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        upstream, _ = await loop.create_connection(lambda: RelayUpstream(client), self._host, self._port)
        upstream.writelines(self._early)
        self._upstream = upstream

    def data_received(self, data: bytes) -> None:
        if self._upstream is None:
            self._early.append(data)
        else:
            self._upstream.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._upstream is not None:
            self._upstream.close()


async def serve_relay(instance_url: str, on_ready: Callable[[int, int | None], None]) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Relay(instance_url), "127.0.0.1", 0)
    on_ready(server.sockets[0].getsockname()[1], None)
    await server.serve_forever()


def run_router(
    mode: str, core: int, instance_url: str, store_url: str, collector_url: str, ready: Connection, profile: Path | None
) -> None:
    """The child process: one replica on its core, until SIGTERM."""
    logging.basicConfig(level=logging.ERROR)
    os.sched_setaffinity(0, {core})

    def on_ready(port: int, ops_port: int | None) -> None:
        ready.send(port)

    extra: dict[str, Any] = {}
    if mode == "logged":
        extra = {"request_log": str(Path(tempfile.gettempdir()) / f"router-overhead-{os.getpid()}.jsonl")}
    elif mode == "python":
        extra = {"native_relay": False}
    elif mode in CONTINUED:
        extra = {"continue_streams": CONTINUED[mode]}
    elif mode in TRACED_SHARE:
        extra = {"tracing_url": collector_url, "tracing_share": TRACED_SHARE[mode]}

    async def run() -> None:
        if mode == "relay":
            await serve_relay(instance_url, on_ready)
        elif mode == "plane":
            await serve_plane(BlindIntake(instance_url), on_ready)
        elif mode == "asking":
            wire = await Wire.open(ConnectionPool.from_url(store_url), timeout_s=1.0)
            await serve_plane(AskingIntake(instance_url, wire), on_ready)
        else:
            settings = RouterSettings(port=0, settle_s=0.0, **extra)
            scheduling = SchedulingSettings(
                split=SplitSettings(mode="always" if mode == "split" else "auto"), admit_runs=mode in ("turns", "runs")
            )
            served = tenants() if mode == "tenants" else ()
            store = StoreSettings(url=store_url)
            await serve(settings, scheduling, store, [PoolSettings()], tenants=served, on_ready=on_ready)

    if profile is None:
        uvloop.run(run())
        return
    profiler = cProfile.Profile()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises the signal again when it has stopped
    try:
        profiler.runcall(uvloop.run, run())
    finally:
        profiler.dump_stats(profile / f"router_{mode}.prof")


@contextlib.contextmanager
def modules_of(checkout: str) -> Iterator[None]:
    """A process that is started meanwhile imports the project, and this module, from a checkout; "" changes nothing."""
    former = sys.path.copy()
    if checkout:
        sys.path[:0] = [checkout, str(Path(checkout) / "benchmarks")]
    try:
        yield
    finally:
        sys.path[:] = former


def cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@dataclass
class Listener:
    """A process that serves on a port of this machine."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    async def cpu_of(self, load: Awaitable[None]) -> float:
        before_s = self.cpu_s()
        await load
        await asyncio.sleep(0.1)  # transitions still in its outbox belong to the load
        return self.cpu_s() - before_s


@dataclass
class Router(Listener):
    process: multiprocessing.process.BaseProcess


def start_router(
    mode: str, core: int, instance_url: str, store_url: str, collector_url: str, profile: Path | None
) -> Router:
    mode, _, checkout = mode.partition("@")
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(
        target=run_router, args=(mode, core, instance_url, store_url, collector_url, child, profile)
    )
    with modules_of(checkout):
        process.start()
    if not parent.poll(30):
        process.kill()  # else this process waits for it at its end
        raise TimeoutError("the router did not start")
    assert process.pid is not None  # it was started
    return Router(process.pid, parent.recv(), process)


# the measurement -------------------------------------------------------------------------------------------------
async def measure_once(router: Router, requests: int, seed: int, mode: str = "full") -> dict[str, float]:
    figures = {}
    for name, size in (("2 KB", 2048), ("32 KB", 32768)):
        wires = [request(size, seed + n, key=key_of(mode, n)) for n in range(requests)]
        cpu_s = await router.cpu_of(closed_loop(router.port, wires, CONNECTIONS))
        figures[f"us/request {name}"] = cpu_s / requests * 1e6
    wires = [request(2048, seed + n, f"{BURST_CHUNKS},0", key_of(mode, n)) for n in range(40)]
    cpu_s = await router.cpu_of(closed_loop(router.port, wires, 4))
    figures["us/chunk burst"] = cpu_s / (len(wires) * BURST_CHUNKS) * 1e6
    paced = f"{PACED_CHUNKS},{PACE_S * 1000:.0f}"
    wires = [request(2048, seed + n, paced, key_of(mode, n)) for n in range(PACED_STREAMS)]
    cpu_s = await router.cpu_of(closed_loop(router.port, wires, PACED_STREAMS))
    figures["us/chunk paced"] = cpu_s / (PACED_STREAMS * PACED_CHUNKS) * 1e6
    return figures


async def added_latency_ms(
    router: Listener, mock_port: int, requests: int, rate_per_s: float, mode: str = "full"
) -> dict[str, float]:
    wires = [request(2048, n, key=key_of(mode, n)) for n in range(requests)]
    first = [request(2048, 10**6 + n, key=key_of(mode, n)) for n in range(200)]
    await closed_loop(router.port, first, 4)  # connections and caches
    direct_s = await open_loop(mock_port, wires, rate_per_s)
    through_s = await open_loop(router.port, wires, rate_per_s)
    ranks = {"added ms P50": requests // 2, "added ms P99": int(requests * 0.99)}
    return {name: (through_s[rank] - direct_s[rank]) * 1000 for name, rank in ranks.items()}


@contextlib.asynccontextmanager
async def running(
    mode: str, core: int, instances: int, *, tcp: bool = False, profile: Path | None = None
) -> AsyncIterator[tuple[Router, int, EmbeddedValkey]]:
    """One router process, the port of the mock instance that all its members are, and its store."""
    mock = await asyncio.get_running_loop().create_server(MockInstance, "127.0.0.1", 0)
    mock_port = mock.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{mock_port}"
    folder = Path(tempfile.mkdtemp(prefix="dualmap-"))
    server = EmbeddedValkey(unix_socket=None if tcp else folder / "valkey.sock")
    await asyncio.to_thread(server.start)
    store = await open_store(StoreSettings(url=server.url), scheduling=SchedulingSettings())
    try:
        for number in range(instances):
            role = SPLIT_ROLES[number % 2] if mode == "split" else Role.MIXED
            spec = InstanceSpec(f"instance-{number}", url, role, InstanceState.READY, prefill_tokens_per_s=1e7)
            await store.pool("default").members.put_instance(spec)
        router = await asyncio.to_thread(start_router, mode, core, url, server.url, start_collector(), profile)
        try:
            yield router, mock_port, server
        finally:
            router.process.terminate()
            await asyncio.to_thread(router.process.join, 20)
    finally:
        await store.close()
        await asyncio.to_thread(server.stop)
        mock.close()


@contextlib.contextmanager
def awake(core: int) -> Iterator[None]:
    """A core that never sleeps: a process of the lowest priority keeps it busy."""
    spin = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    spinning = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\n{spin}"])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


async def measure(mode: str, core: int, options: argparse.Namespace) -> dict[str, object]:
    started = running(mode, core, options.instances, tcp=options.tcp, profile=options.profile)
    async with started as (router, mock_port, _):
        rss_mb = router.rss_mb()
        if options.repetitions:
            await measure_once(router, 200, 10**6, mode)
        runs = [await measure_once(router, options.requests, n * 10**7, mode) for n in range(options.repetitions)]
        names = runs[0] if runs else ()
        medians = {name: round(statistics.median(run[name] for run in runs), 1) for name in names}
        for streams in options.streams.split(",") if options.streams else ():
            count, pace_ms = map(int, streams.split(":"))
            measured = await paced_streams(router, count, pace_ms, options.stream_chunks, mode)
            medians |= {name: round(value, 3) for name, value in measured.items()}
        if not options.latency_requests:
            return {"mode": mode, **medians, "RSS MB": f"{rss_mb:.0f} -> {router.rss_mb():.0f}"}
        with awake(core) if options.awake else contextlib.nullcontext():
            latency = await added_latency_ms(router, mock_port, options.latency_requests, options.rate, mode)
        rounded = {name: round(value, 2) for name, value in latency.items()}
        return {"mode": mode, **medians, **rounded, "RSS MB": f"{rss_mb:.0f} -> {router.rss_mb():.0f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="full,plane,relay")
    parser.add_argument("--repetitions", type=int, default=3, help="0: the added latency alone")
    parser.add_argument("--requests", type=int, default=3000, help="of each size and repetition")
    parser.add_argument("--latency-requests", type=int, default=200, help="0: no added latency")
    parser.add_argument("--streams", help="also so many streams at once, COUNT:MILLISECONDS between chunks, by commas")
    parser.add_argument("--stream-chunks", type=int, default=300, help="of each of these streams")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second of the latency")
    parser.add_argument("--awake", action="store_true", help="keep the router's core awake while latency is measured")
    parser.add_argument("--instances", type=int, default=8, help="all of them the one mock")
    parser.add_argument("--tcp", action="store_true", help="the store over TCP, else over a Unix socket")
    parser.add_argument("--profile", type=Path, help="write cProfile files here (and measure slower figures)")
    options = parser.parse_args()
    cores = os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(0, cores - {core} or cores)
    for mode in options.modes.split(","):
        print(json.dumps(uvloop.run(measure(mode, core, options))), flush=True)


if __name__ == "__main__":
    main()
