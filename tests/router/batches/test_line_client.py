"""The client of a line, which keeps its answer."""

from __future__ import annotations

import orjson

from dualmap.router.batches.line_client import LineClient
from dualmap.router.errors import NotFoundError, QueueFullError

PATH = "/v1/completions"
BODY = orjson.dumps({"id": "cmpl-1", "usage": {"prompt_tokens": 8, "total_tokens": 12}})


def head(*fields: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"X-Request-Id: line-1", b"X-DualMap-Cached-Tokens: 3", *fields, b"", b""])


async def test_an_answer_is_read_back_from_its_bytes_however_it_is_framed() -> None:
    whole, chunked = LineClient(PATH), LineClient(PATH)

    whole.write_head(head(b"content-length: %d" % len(BODY)) + BODY[:5])
    whole.write(BODY[5:])
    chunked.write_head(head(b"transfer-encoding: chunked"))
    chunked.write(b"%x\r\n%b\r\n" % (len(BODY), BODY))
    assert not chunked.is_whole
    chunked.write(b"0\r\n\r\n")

    for client in (whole, chunked):
        assert (client.is_whole, client.status, client.request_id) == (True, 200, "line-1")
        assert client.body == orjson.loads(BODY)
        assert client.used_tokens() == (12, 5)


async def test_a_refusal_is_kept_with_the_time_after_which_it_may_be_taken() -> None:
    client = LineClient(PATH)

    client.refuse(QueueFullError("full; try later", retry_after_s=2.5), [(b"x-request-id", b"line-2")])

    assert (client.status, client.retry_after_s, client.request_id) == (429, 2.5, "line-2")
    assert client.is_whole
    assert (client.body or {})["error"]["code"] == "queue_full"
    assert client.used_tokens() is None


async def test_an_answer_that_breaks_off_is_not_whole() -> None:
    for ends in (
        LineClient.abort,
        lambda client: client.break_off(b"{}"),
        lambda client: client.refuse(NotFoundError("x")),
    ):
        client = LineClient(PATH)
        client.write_head(head(b"content-length: 100") + b"{")
        ends(client)
        assert not client.is_whole
        assert client.status == 200
        assert client.body is None


async def test_a_stream_is_kept_as_the_whole_answer_and_one_that_failed_is_none() -> None:
    def event(**choice: object) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(
            {"id": "cmpl-1", "choices": [{"index": 0, "finish_reason": None} | choice]}
        )

    def streamed(*events: bytes) -> LineClient:
        client = LineClient(PATH)
        client.write_head(head(b"content-type: text/event-stream; charset=utf-8", b"transfer-encoding: chunked"))
        for each in events:
            client.write(b"%x\r\n%b\r\n" % (len(each), each))
        client.write(b"0\r\n\r\n")
        return client

    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":9}}\n\n'
    whole = streamed(
        b": a comment\n\n" + event(text="a"), event(text="b", finish_reason="stop"), usage, b"data: [DONE]\n\n"
    )
    failed = streamed(event(text="a"), b'data: {"error":{"message":"x"}}\n\n')

    assert whole.is_whole
    assert (whole.body or {})["choices"] == [{"index": 0, "finish_reason": "stop", "text": "ab"}]
    assert whole.used_tokens() == (9, 4)
    assert not failed.is_whole
    assert failed.body is None
