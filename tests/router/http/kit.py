"""Both ends of the data plane on real sockets: raw clients, scripted instances, a stand-in for the life cycle."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from uvicorn.server import ServerState

from dualmap.router.errors import UpstreamError, UpstreamTimeoutError
from dualmap.router.http import DataPlane
from dualmap.router.pool.instance_loss import InstanceLossNotifier
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.requests.refusals import outcome_of
from dualmap.runtime.clock import RealClock
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.charge import Counted
from dualmap.scheduling.request.machine import Failed, RequestSpec
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.request.retry_budget import RetryBudget
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.tier_load import Source

CHAT = "/v1/chat/completions"
WITHIN_S = 20.0
"""Less than ``router.client_timeout_s``, after which a connection is closed whatever the router did before."""


async def eventually(condition: Callable[[], object], *, within_s: float = WITHIN_S) -> None:
    """Poll until the condition holds; the test fails at the deadline."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


# the life cycle ------------------------------------------------------------------------------------------------
@dataclass
class Machine:
    """Where a request is: on the URL of its present try."""

    request_id: str
    spec: RequestSpec
    urls: list[str]
    rank: int | None = None
    max_load_tokens: int | None = None
    source: Source | None = None
    attempt: int = 1
    pulled_within_s: float | None = None
    tries: int = 1
    expected_ttft_s: float | None = 0.25

    to_send = Leg.WHOLE
    is_decoded = is_evictable = False

    def instance_for(self, leg: Leg) -> InstanceSpec:
        assert leg is Leg.WHOLE
        number = min(self.tries, len(self.urls)) - 1
        return InstanceSpec(f"i{number}", self.urls[number], data_parallel_rank=self.rank)

    @property
    def instance_id(self) -> str:
        return self.instance_for(Leg.WHOLE).instance_id

    @property
    def answering_id(self) -> str:
        return self.instance_id


@dataclass
class Pool:
    """What the doors need of a pool."""

    loss_notifier: InstanceLossNotifier = field(
        default_factory=lambda: InstanceLossNotifier(RetryBudget(0.0, 1.0, 0.0), RealClock())
    )
    settings: PoolSettings = field(default_factory=PoolSettings)


@dataclass
class PlacedRequest:
    intake: Intake
    machine: Machine
    expected_cached_tokens: int = 128
    first_tokens: int = 0
    faults: list[InstanceFailure] = field(default_factory=list)
    """Failures of answers that had begun."""
    failures: list[InstanceFailure] = field(default_factory=list)
    sent_tokens: list[int | None] = field(default_factory=list)
    """Tokens that the client had at each failure; None: it was to have nothing."""
    finished: list[tuple[Outcome, Usage | None]] = field(default_factory=list)
    counted: Counted | None = None

    on_evict: Callable[[str], None] | None = None
    abort_requested = False

    @property
    def request_id(self) -> str:
        return self.machine.request_id

    @property
    def pool(self) -> Pool:
        return self.intake.pool

    def limit_fields(self) -> list[tuple[bytes, bytes]]:
        return []

    def sent(self) -> None:
        pass

    def first_token(self) -> None:
        self.first_tokens += 1

    def broke_off(self, failure: InstanceFailure) -> None:
        self.faults.append(failure)

    async def prefill_ended(self) -> None:
        raise AssertionError("it is not split")

    async def failed(self, event: Failed) -> None:
        failure = event.failure
        if event.overdue or (failure.kind is FailureKind.TIMEOUT and not self.intake.requests[-1].stream):
            self.faults.append(failure)
            raise UpstreamTimeoutError(f"the instance did not answer in time: {failure.detail}")
        self.failures.append(failure)
        self.sent_tokens.append(event.sent_tokens)
        machine = self.machine
        if machine.tries >= len(machine.urls):
            raise UpstreamError(f"no instance is left: {failure}")
        if self.intake.gate_of_retries is not None:
            await self.intake.gate_of_retries.wait()
        machine.expected_ttft_s = None
        machine.tries += 1

    def finish(self, outcome: Outcome, usage: Usage | None = None, counted: Counted | None = None) -> None:
        self.finished.append((outcome, usage))
        self.counted = counted

    @property
    def outcome(self) -> Outcome | None:
        return self.finished[0][0] if self.finished else None


@dataclass
class Intake:
    """Places every request on the first URL; retries go down the list."""

    urls: list[str]
    model: str | None = None
    renamed: str | None = None
    refusal: Exception | None = None
    rank: int | None = None
    gate: asyncio.Event | None = None
    gate_of_retries: asyncio.Event | None = None
    requests: list[InferenceRequest] = field(default_factory=list)
    placed_requests: list[PlacedRequest] = field(default_factory=list)
    pool: Pool = field(default_factory=Pool)
    ended: list[Outcome] = field(default_factory=list)
    """How requests ended that were cancelled before they were placed."""

    async def place(self, request: InferenceRequest) -> PlacedRequest:
        self.requests.append(request)
        request.prompt = None  # as hashing it does
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError as error:
                self.ended.append(outcome_of(error))
                raise
        if self.refusal is not None:
            raise self.refusal
        request_id, model = self.renamed or request.request_id, self.model or request.model
        spec = RequestSpec(prompt_hash=0, chain=None, slo_s=1.0, model=model)
        placed = PlacedRequest(self, Machine(request_id, spec, self.urls, self.rank))
        self.placed_requests.append(placed)
        return placed

    @property
    def placed_request(self) -> PlacedRequest:
        assert len(self.placed_requests) == 1
        return self.placed_requests[0]


# an instance ---------------------------------------------------------------------------------------------------
class Talk:
    """One request as the instance sees it, and the means to misbehave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes) -> None:
        self.reader, self.writer, self.head, self.body = reader, writer, head, body

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return dict(line.split(": ", 1) for line in lines if line)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, value: Any = None, status: int = 200, extra: str = "") -> None:
        body = orjson.dumps(value if value is not None else {"object": "chat.completion", "choices": []})
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
        await self.send(head.encode() + body)

    async def begin_stream(self) -> None:
        await self.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        await self.chunk(b"data: " + (value if isinstance(value, bytes) else orjson.dumps(value)) + b"\n\n")

    async def token(self, text: str) -> None:
        await self.event({"choices": [{"index": 0, "delta": {"content": text}}]})

    async def role(self) -> None:
        await self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})

    async def end_stream(self) -> None:
        await self.event(b"[DONE]")
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with RST."""
        self.writer.transport.abort()

    async def until_closed(self) -> None:
        """Return when the router closes the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Talk], Awaitable[None]]


class Instance:
    """A raw TCP server that answers as scripted. A script that returns keeps the connection for more."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.talks: list[Talk] = []
        self.connections = 0
        self.open = 0
        self.url = ""
        self.stop: Callable[[], Awaitable[None]]
        self.close_port: Callable[[], None]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
                )
                talk = Talk(reader, writer, head, await reader.readexactly(length))
                self.talks.append(talk)
                await self.script(talk)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


class StartInstance(Protocol):
    """Starts a scripted instance on a free port."""

    async def __call__(self, script: Script, *, tls: ssl.SSLContext | None = None) -> Instance: ...


# the router ----------------------------------------------------------------------------------------------------
async def tiny_app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Stands for the ASGI side: tells what it was asked."""
    message = await receive()
    body = orjson.dumps({"app": scope["path"], "method": scope["method"], "body": message["body"].decode()})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass
class Router:
    plane: DataPlane
    state: ServerState
    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self, *, tls: ssl.SSLContext | None = None) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=tls))
        self.clients.append(client)
        return client


StartRouter = Callable[..., Awaitable[Router]]
"""Serves the data plane over a life cycle; keyword arguments are router settings."""


# a client ------------------------------------------------------------------------------------------------------
@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True
    """False when the connection closed before the framing's end."""

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class Client:
    """A raw HTTP client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def request(self, path: str, value: Any = None, *, method: str = "POST", headers: str = "") -> None:
        body = value if isinstance(value, bytes) else orjson.dumps(value) if value is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nhost: fleet\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        self.send(head.encode() + body)

    def chat(self, *, stream: bool = False, requests_usage: bool = False, headers: str = "", model: str = "m") -> None:
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        if requests_usage:
            body["stream_options"] = {"include_usage": True}
        self.request(CHAT, body, headers=headers)

    async def head(self) -> Answer:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WITHIN_S)
        first, *lines = raw.decode("latin-1").split("\r\n")
        return Answer(int(first.split()[1]), dict(line.split(": ", 1) for line in lines if line), b"")

    async def chunk(self) -> bytes:
        size = int((await asyncio.wait_for(self.reader.readuntil(b"\r\n"), WITHIN_S)).split(b";")[0], 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), WITHIN_S)
        return data[:-2]

    async def answer(self, *, bodiless: bool = False) -> Answer:
        answer = await self.head()
        if bodiless or answer.status in (204, 304):
            return answer
        try:
            if "content-length" in answer.headers:
                length = int(answer.headers["content-length"])
                answer.body = await asyncio.wait_for(self.reader.readexactly(length), WITHIN_S)
            elif answer.headers.get("transfer-encoding") == "chunked":
                while data := await self.chunk():
                    answer.body += data
            else:
                answer.body = await asyncio.wait_for(self.reader.read(), WITHIN_S)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            answer.body += getattr(error, "partial", b"")
            answer.whole = False
        return answer

    async def closed(self) -> bool:
        """True when the router closes the connection without another byte."""
        try:
            return await asyncio.wait_for(self.reader.read(), WITHIN_S) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()
