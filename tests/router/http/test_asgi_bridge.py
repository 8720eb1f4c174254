"""Requests handed to an ASGI application: what it sees, and what the client gets of what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from dualmap.router.errors import ConflictError
from dualmap.router.http.client import BUFFER_BYTES
from tests.router.http import kit
from tests.router.http.kit import Client, Router, StartRouter

Serve = Callable[..., Awaitable[tuple[Router, Client]]]


@pytest.fixture
def serve(start_router: StartRouter) -> Serve:
    """A router over an ASGI application, and a connected client."""

    async def start(app: Any, **settings: Any) -> Any:
        router = await start_router(kit.Intake([]), app=app, **settings)
        return router, await router.connect()

    return start


def fastapi_app() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/ui/echo/{name}")
    async def echo(name: str, request: Request) -> dict[str, object]:
        return {"name": name, "query": dict(request.query_params), "body": await request.json()}

    @app.get("/ui/stream")
    async def stream() -> StreamingResponse:
        async def pieces() -> AsyncIterator[Any]:
            for n in range(3):
                yield f"piece {n}\n"

        return StreamingResponse(pieces())

    return app


async def test_a_fastapi_application_works_on_the_same_port(serve: Serve) -> None:
    _, client = await serve(fastapi_app())
    client.request("/health", method="GET")
    assert (await client.answer()).json() == {"status": "ok"}
    client.request("/ui/echo/a%C3%A9?x=1", {"k": [1]})
    assert (await client.answer()).json() == {"name": "aé", "query": {"x": "1"}, "body": {"k": [1]}}
    client.request("/ui/stream", method="GET")
    answer = await client.answer()
    assert answer.headers["transfer-encoding"] == "chunked" and answer.body == b"piece 0\npiece 1\npiece 2\n"
    client.request("/openapi.json", method="GET")
    assert "/health" in (await client.answer()).json()["paths"]
    client.request("/ui/missing", method="GET")
    assert (await client.answer()).status == 404


async def test_head_announces_and_sends_nothing(serve: Serve) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    _, client = await serve(app)
    client.request("/ui/x", method="HEAD")
    answer = await client.answer(bodiless=True)
    assert answer.headers["content-length"] == "5"
    client.request("/ui/x", method="GET")
    assert (await client.answer()).body == b"hello"


async def test_head_is_answered_where_an_application_knows_get_alone(serve: Serve) -> None:
    _, client = await serve(fastapi_app())
    for path in ("/health", "/ui/stream"):
        client.request(path, method="HEAD")
        assert (await client.answer(bodiless=True)).status == 200
    client.request("/health", method="GET")
    assert (await client.answer()).json() == {"status": "ok"}, "no byte was sent behind the heads"


async def test_an_application_cannot_meddle_with_the_framing(serve: Serve) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Connection", b"upgrade"), (b"Transfer-Encoding", b"gzip"), (b"X-A", b"b")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    _, client = await serve(app)
    client.request("/ui/x", method="GET")
    answer = await client.answer()
    assert answer.body == b"ab" and answer.headers["transfer-encoding"] == "chunked"
    assert "connection" not in answer.headers and answer.headers["x-a"] == "b"


async def test_an_http_10_client_gets_a_stream_that_ends_with_the_connection(serve: Serve) -> None:
    _, client = await serve(fastapi_app())
    client.send(b"GET /ui/stream HTTP/1.0\r\n\r\n")
    answer = await client.answer()
    assert answer.body == b"piece 0\npiece 1\npiece 2\n" and "transfer-encoding" not in answer.headers


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("secret"), 500), (ConflictError("the id is taken"), 409)])
async def test_an_exception_of_the_application_is_an_openai_style_answer(
    serve: Serve, error: Exception, status: int
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    _, client = await serve(app)
    client.request("/ui/x", method="GET")
    answer = await client.answer()
    assert answer.status == status and "secret" not in answer.error["message"]
    client.request("/ui/x", method="GET")
    assert (await client.answer()).status == status


async def test_an_application_that_fails_in_its_answer_breaks_the_connection(serve: Serve) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("no more")

    _, client = await serve(app)
    client.request("/ui/x", method="GET")
    assert not (await client.answer()).whole


async def test_an_application_that_fails_behind_a_whole_answer_is_logged_and_the_next_request_answered(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()

    @app.get("/ui/broken")
    async def broken() -> None:
        raise ValueError("a secret")

    @app.exception_handler(Exception)  # Starlette sends its answer, and raises all the same
    async def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"sorry": True}, status_code=500)

    _, client = await serve(app)
    for _ in range(2):
        client.request("/ui/broken", method="GET")
    for _ in range(2):
        answered = await client.answer()
        assert (answered.status, answered.json()) == (500, {"sorry": True})
        assert "connection" not in answered.headers
    assert caplog.text.count("GET /ui/broken failed") == 2


async def test_an_application_that_never_answers_is_an_error(serve: Serve) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        return

    _, client = await serve(app)
    client.request("/ui/x", method="GET")
    assert (await client.answer()).status == 500


async def test_an_application_hears_that_its_client_left(serve: Serve) -> None:
    heard: list[str] = []
    waiting = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive())["type"])
        waiting.set()
        heard.append((await receive())["type"])
        with pytest.raises(OSError, match="disconnected"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.append("refused")

    router, client = await serve(app)
    client.request("/ui/x", {"a": 1})
    await waiting.wait()
    client.close()
    await kit.eventually(lambda: len(heard) == 3 and not router.state.tasks)
    assert heard == ["http.request", "http.disconnect", "refused"]


async def test_an_application_waits_for_a_slow_client(serve: Serve) -> None:
    sent, total, unsent_bytes = 0, 20_000_000, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent, unsent_bytes
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent < total:
            await send({"type": "http.response.body", "body": b"x" * 50_000, "more_body": True})
            sent += 50_000
            [connection] = router.state.connections
            unsent_bytes = max(unsent_bytes, connection._transport.get_write_buffer_size())
        await send({"type": "http.response.body", "body": b""})

    router, client = await serve(app)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.request("/ui/x", method="GET")
    await kit.eventually(lambda: any(not connection._writable for connection in router.state.connections))
    assert 0 < sent < total
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert len((await client.answer()).body) == total
    assert unsent_bytes <= BUFFER_BYTES, "the application went on while the client did not take what it had"


async def test_models_need_a_key_and_health_does_not(serve: Serve) -> None:
    _, client = await serve(fastapi_app(), api_keys=("k",))
    client.request("/v1/models", method="GET")
    assert (await client.answer()).status == 401
    client.request("/health", method="GET")
    assert (await client.answer()).status == 200
    client.request("/v1/models", method="GET", headers="authorization: Bearer k\r\n")
    assert (await client.answer()).status == 404, "let through: this application just has no such path"


async def test_the_application_gets_addresses_and_state(serve: Serve) -> None:
    seen = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    router, client = await serve(app)
    client.request("/ui/a%2Fb", method="GET")
    assert (await client.answer()).status == 204
    assert seen["server"] == ("127.0.0.1", router.port) and seen["client"][0] == "127.0.0.1"
    assert (seen["path"], seen["raw_path"], seen["scheme"]) == ("/ui/a/b", b"/ui/a%2Fb", "http")
