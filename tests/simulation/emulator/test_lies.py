"""Instances that look healthy and are not."""

from __future__ import annotations

import httpx
import pytest

from dualmap.simulation.emulator.lies import Lie

BODY = {"model": "dualmap-emulated", "prompt": "hello", "max_tokens": 8}


async def told(http: httpx.AsyncClient, lie: str | None, **order: object) -> None:
    assert (await http.post("/emulator/lie", json={"lie": lie, **order})).json() == {"lie": lie}


async def ask(http: httpx.AsyncClient, *, stream: bool) -> tuple[int, str, bytes, bool]:
    """Status, type and body of an answer, and whether it came whole."""
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    body = b""
    async with http.stream("POST", "/v1/completions", json={**BODY, "model": model, "stream": stream}) as answer:
        try:
            async for piece in answer.aiter_raw():
                body += piece
        except httpx.HTTPError:
            return answer.status_code, answer.headers["content-type"], body, False
        return answer.status_code, answer.headers["content-type"], body, True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("lie", "status"),
    [("redirect", 302), ("unauthorized", 401), ("not_found", 404), ("busy", 429), ("empty", 200), ("page", 200)],
)
async def test_a_lie_may_need_no_engine(http: httpx.AsyncClient, lie: str, status: int, stream: bool) -> None:
    await told(http, lie)
    answered, content_type, body, whole = await ask(http, stream=stream)
    assert (answered, whole) == (status, True)
    assert (body == b"") is (lie == "empty")
    assert content_type.startswith("text/html") is (lie == "page")
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("lie", ["broken", "truncated", "error_event", "abort"])
async def test_a_stream_may_go_wrong_after_its_first_tokens(http: httpx.AsyncClient, lie: str) -> None:
    await told(http, lie)
    status, _, body, whole = await ask(http, stream=True)
    assert status == 200 and b'"text"' in body
    assert whole is (lie != "broken")
    assert (b"[DONE]" in body) is (lie in ("error_event", "abort"))
    assert (b'"finish_reason":"abort"' in body) is (lie == "abort")
    await told(http, None)
    assert (await ask(http, stream=True))[2].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("lie", ["broken", "truncated", "error_event", "abort", "error_200"])
async def test_a_whole_answer_may_be_none(http: httpx.AsyncClient, lie: str) -> None:
    await told(http, lie)
    status, _, body, whole = await ask(http, stream=False)
    assert whole is (lie not in ("broken", "truncated"))
    assert status == (500 if lie == "error_event" else 200)
    assert (b'"finish_reason":"abort"' in body) is (lie == "abort")


async def test_a_lie_may_be_told_now_and_then(http: httpx.AsyncClient) -> None:
    await told(http, Lie.NOT_FOUND, every=3)
    statuses = [(await ask(http, stream=False))[0] for _ in range(6)]
    assert statuses == [200, 200, 404, 200, 200, 404]


async def test_a_busy_instance_may_say_when_to_come_back(http: httpx.AsyncClient) -> None:
    await told(http, Lie.BUSY, retry_after="7")
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    assert (await http.post("/v1/completions", json=BODY | {"model": model})).headers["retry-after"] == "7"


async def test_an_unknown_lie_is_refused(http: httpx.AsyncClient) -> None:
    assert (await http.post("/emulator/lie", json={"lie": "white"})).status_code == 400


@pytest.mark.parametrize("lie", ["error_event", "abort"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_lie_has_the_form_of_its_api(http: httpx.AsyncClient, path: str, lie: str) -> None:
    await told(http, lie)
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    said = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    if path == "/v1/responses":
        said = {"input": "hello", "max_output_tokens": 8}
    body = b""
    try:
        async with http.stream("POST", path, json={"model": model, "stream": True, **said}) as answer:
            async for piece in answer.aiter_raw():
                body += piece
    except httpx.HTTPError:
        assert path == "/v1/responses", "responses have no word for it, and break off"

    assert body.startswith(b"event: ") and b"[DONE]" not in body
    if path == "/v1/messages":
        assert (b"event: error" in body) is (lie == "error_event")
        assert (b"event: message_stop" in body) is (lie == "abort")
