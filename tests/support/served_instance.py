"""An instance that reads requests as vLLM's own server does: FastAPI on uvicorn, JSON bodies by pydantic models that
keep unknown fields, forms by Starlette.

Paths are decoded once and then routed; of a doubled key the last one counts; UTF-16 and UTF-32 are detected;
``content-encoding`` is ignored. The emulator shares the router's parsers, so what a server behind the router makes of
odd bytes is tested here. Answers count tokens by words, and can be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Form, HTTPException, Request, Response, UploadFile
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

STOP_S = 10.0


class Body(BaseModel):
    """The fields of a JSON body that the instance obeys; all others are kept."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = False
    n: int | None = 1
    max_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class ReadRequest:
    """A request as the instance read it."""

    method: str
    path: str
    """The path that was routed: decoded."""
    raw_path: str
    """The path as it came, without the query."""
    query: str
    headers: Mapping[str, str]
    fields: Mapping[str, Any]
    """The fields of the JSON body or form; empty for a request without a body."""
    body: bytes
    """The bytes of a JSON body as they came; empty for a form."""

    @property
    def model(self) -> str | None:
        return self.fields.get("model")


Answerer = Callable[[ReadRequest], Response]


@dataclass
class ServedInstance:
    """A running instance, and what it has read. ``answer`` may be replaced while it runs."""

    url: str
    models: tuple[str, ...]
    reads: list[ReadRequest] = field(default_factory=list)
    answer: Answerer | None = None
    """Answers requests for inference; None: as ``engine_answer`` does."""

    @property
    def last(self) -> ReadRequest:
        return self.reads[-1]


@contextlib.contextmanager
def served_instance(
    *models: str, answer: Answerer | None = None, port: int = 0, route_more: Callable[[FastAPI], object] | None = None
) -> Iterator[ServedInstance]:
    """An instance that serves the models on a port of 127.0.0.1, in a thread, for the time of the context.

    ``route_more`` adds routes to its app, before its own.
    """
    listener = socket.create_server(("127.0.0.1", port))
    instance = ServedInstance(f"http://127.0.0.1:{listener.getsockname()[1]}", models or ("m",), answer=answer)
    app = FastAPI(openapi_url=None)
    if route_more is not None:
        route_more(app)
    _route(app, instance)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield instance  # connections wait in the listener until the server has started
    finally:
        server.should_exit = server.force_exit = True
        thread.join(STOP_S)
        listener.close()


async def _require_json(request: Request) -> None:
    """vLLM answers other content types of a body with an error."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "Unsupported Media Type: Only 'application/json' is allowed")


def _route(app: FastAPI, instance: ServedInstance) -> None:
    async def noted(request: Request, fields: Mapping[str, Any], body: bytes = b"") -> Response:
        scope = request.scope
        read = ReadRequest(
            request.method, scope["path"], scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1"),
            dict(request.headers), fields, body,
        )  # fmt: skip
        instance.reads.append(read)
        return (instance.answer or engine_answer)(read)

    async def json_route(request: Request, body: Body) -> Response:
        return await noted(request, body.model_dump(exclude_unset=True), await request.body())

    async def raw_json_route(request: Request) -> Response:
        try:
            fields = await request.json()
        except json.JSONDecodeError as error:
            raise HTTPException(400, f"JSON decode error: {error}") from error
        return await noted(request, fields, await request.body())

    async def form_route(request: Request, file: UploadFile, model: Annotated[str | None, Form()] = None) -> Response:
        form = await request.form()
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        return await noted(request, {**fields, **({"model": model} if model is not None else {})})

    async def bodiless_route(request: Request) -> Response:
        return await noted(request, {})

    for path in (
        "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/messages", "/v1/responses",
        "/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling", "/classify", "/tokenize", "/detokenize",
        "/inference/v1/generate", "/inference/v1/abort_requests", "/generative_scoring", "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ):  # fmt: skip
        app.post(path, dependencies=[Depends(_require_json)])(json_route)
    app.post("/invocations", dependencies=[Depends(_require_json)])(raw_json_route)
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        app.post(path)(form_route)
    for path in ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/v1/responses/{response}/cancel"):
        app.post(path)(bodiless_route)
    for path in ("/v1/responses/{response}", "/is_sleeping", "/is_paused"):
        app.get(path)(bodiless_route)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        name = instance.models[0]
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return Response("".join(f'vllm:{gauge}{{engine="0",model_name="{name}"}} 0\n' for gauge in gauges))

    @app.get("/v1/models")
    async def listed_models() -> Mapping[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in instance.models]}


STAGED = {"remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "10.0.0.1"}
"""KV that a prefill leg has staged, as its answer names it."""


def staging(read: ReadRequest) -> Response:
    """The answer of a prefill leg."""
    answer = json.loads(bytes(engine_answer(read).body))
    return JSONResponse({**answer, "kv_transfer_params": STAGED})


def engine_answer(read: ReadRequest) -> Response:
    """An answer of the form that the API of the path has, with as many tokens as were requested, 3 where none were."""
    model, count = read.model or "m", _output_tokens(read)
    prompt_tokens = max(1, len(json.dumps(dict(read.fields), default=str).split()))
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": count,
        "total_tokens": prompt_tokens + count,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    split_usage = {"input_tokens": prompt_tokens, "output_tokens": count}
    words = ["word "] * count
    match read.path:
        case "/v1/chat/completions":
            if read.fields.get("stream"):
                return StreamingResponse(_chat_events(read, words, usage), media_type="text/event-stream")
            message = {"role": "assistant", "content": "".join(words)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return JSONResponse(
                {"id": "chatcmpl-1", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage}
            )
        case "/v1/completions" | "/invocations":
            choice = {"index": 0, "text": "".join(words), "finish_reason": "length"}
            return JSONResponse(
                {"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice], "usage": usage}
            )
        case "/v1/messages":
            blocks = [{"type": "text", "text": "".join(words)}]
            return JSONResponse(
                {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "content": blocks,
                 "stop_reason": "end_turn", "usage": split_usage}
            )  # fmt: skip
        case "/v1/responses":
            content: list[Any] = [{"type": "output_text", "text": "".join(words), "annotations": []}]
            output = [
                {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
            ]
            return JSONResponse(
                {"id": "resp_1", "object": "response", "status": "completed", "model": model, "output": output,
                 "usage": split_usage}
            )  # fmt: skip
        case _:
            return JSONResponse({"model": model, "text": "".join(words), "usage": usage})


def _output_tokens(read: ReadRequest) -> int:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if isinstance(count := read.fields.get(name), int):
            return count
    return 3


async def _chat_events(read: ReadRequest, words: list[str], usage: Mapping[str, Any]) -> AsyncIterator[bytes]:
    def event(choices: list[Any], **more: Any) -> bytes:
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": read.model, "choices": choices, **more}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    for number, word in enumerate(words, 1):
        reason = "stop" if number == len(words) else None
        yield event([{"index": 0, "delta": {"content": word}, "finish_reason": reason}])
    if (read.fields.get("stream_options") or {}).get("include_usage"):
        yield event([], usage=usage)
    yield b"data: [DONE]\n\n"
