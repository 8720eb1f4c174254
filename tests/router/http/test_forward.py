"""Inference requests through real sockets to instances that answer well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote, unquote

import orjson
import pytest

from dualmap.router.errors import OutOfFilesError, QueueFullError, UnavailableError
from dualmap.router.http.exchange import MAX_HELD_BYTES
from dualmap.router.http.upstream_pool import UpstreamPool
from dualmap.scheduling.request.outcome import FailureKind, Outcome, Usage
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.errors import StoreUnavailableError
from tests.router.http import kit
from tests.router.http.kit import Client, Instance, Script, StartInstance, StartRouter, Talk

DEEP = b"[" * 900 + b"]" * 900
USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


async def whole_answer(talk: Talk) -> None:
    await talk.answer({"object": "chat.completion", "usage": USAGE})


async def whole_stream(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.role()
    await talk.token("a")
    await talk.token("b")
    await talk.event({"choices": [], "usage": USAGE})
    await talk.end_stream()


StartFleet = Callable[..., Awaitable[tuple[kit.Intake, list[Instance], Client]]]


@pytest.fixture
def fleet(start_instance: StartInstance, start_router: StartRouter) -> StartFleet:
    """A router in front of scripted instances, and a connected client."""

    async def start(*scripts: Script, settings: Any = None, must_be_asked: Any = False, **intake: Any) -> Any:
        """``must_be_asked``: the instances are known to send usage on request alone."""
        instances = [await start_instance(script) for script in scripts]
        placed = kit.Intake([instance.url for instance in instances], **intake)
        router = await start_router(placed, **(settings or {}))
        for instance in instances if must_be_asked else ():
            router.plane.usage_requests.saw(instance.url, sends_unrequested=False)
        return placed, instances, await router.connect()

    return start


async def test_a_rank_is_asked_for_by_its_number_and_clients_choose_none(fleet: StartFleet) -> None:
    _, [rank], client = await fleet(whole_answer, rank=3)
    client.chat(headers="x-data-parallel-rank: 1\r\n")
    await client.answer()
    _, [server], client = await fleet(whole_answer)
    client.chat(headers="x-data-parallel-rank: 1\r\n")
    await client.answer()

    assert rank.talks[0].headers["x-data-parallel-rank"] == "3"
    assert "x-data-parallel-rank" not in server.talks[0].headers


# answers that pass ---------------------------------------------------------------------------------------------
async def test_an_answer_passes_with_the_fleets_fields(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(whole_answer)
    client.chat(headers="x-request-id: mine\r\ntraceparent: 00-aa-bb-01\r\nauthorization: Bearer own\r\n")
    answer = await client.answer()
    assert answer.status == 200 and answer.json()["object"] == "chat.completion"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-dualmap-instance"] == "i0"
    assert answer.headers["x-dualmap-cached-tokens"] == "128"
    assert answer.headers["x-dualmap-attempts"] == "1"
    assert answer.headers["x-dualmap-expected-ttft-ms"] == "250.0"
    sent = instance.talks[0].headers
    assert sent["x-request-id"] == "mine"
    assert sent["traceparent"] == "00-aa-bb-01"
    assert sent["authorization"] == "Bearer own"
    assert sent["host"] == instance.url.removeprefix("http://")
    assert intake.placed_request.finished == [(Outcome.COMPLETED, Usage(prompt_tokens=9, cached_tokens=4))]


async def test_an_instance_of_a_replica_that_traces_finds_the_requests_own_span_as_its_parent(
    fleet: StartFleet,
) -> None:
    tracing = {"tracing_url": "http://127.0.0.1:9/v1/traces", "tracing_share": 0.0}
    intake, [instance], client = await fleet(whole_answer, settings=tracing)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

    client.chat(headers=f"traceparent: 00-{trace}-{parent}-01\r\ntracestate: vendor=x\r\n")
    await client.answer()
    client.chat()
    await client.answer()

    continued, begun = (talk.headers for talk in instance.talks)
    version, sent_trace, span, flags = continued["traceparent"].split("-")
    assert (version, sent_trace, flags) == ("00", trace, "01")
    assert span != parent
    assert continued["tracestate"] == "vendor=x"
    assert begun["traceparent"].endswith("-00"), "not sampled: the instance must not begin a trace of its own"
    assert intake.requests[0].trace.to_header().decode() == continued["traceparent"]


async def test_a_request_without_an_id_gets_one_that_instance_and_client_agree_on(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(whole_answer)
    client.chat()
    answer = await client.answer()
    assert len(answer.headers["x-request-id"]) == 32
    assert instance.talks[0].headers["x-request-id"] == answer.headers["x-request-id"]
    assert intake.requests[0].request_id == answer.headers["x-request-id"]


async def test_a_body_reaches_the_instance_byte_for_byte(fleet: StartFleet) -> None:
    _, [instance], client = await fleet(whole_answer)
    body = b'{ "messages":[{"role":"user","content":"\\u00e9 "}],\n"model" : "m","seed":123456789012345678901 }'
    client.request(kit.CHAT, body)
    await client.answer()
    assert instance.talks[0].body == body


async def test_an_alias_is_resolved_in_the_body_and_nothing_else_is_touched(fleet: StartFleet) -> None:
    _, [instance], client = await fleet(whole_answer, model="real-name")
    body = b'{"model": "%%b", "messages": [{"role": "user"}], "seed": 18446744073709551616, "deep": %b}' % DEEP
    client.request(kit.CHAT, body % b"alias")
    assert (await client.answer()).status == 200
    assert instance.talks[0].body == body % b"real-name"


async def test_an_alias_is_resolved_in_a_form(fleet: StartFleet) -> None:
    _, [instance], client = await fleet(whole_answer, model="real-name")
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n'
    headers = "content-type: multipart/form-data; boundary=b\r\n"
    client.request("/v1/audio/transcriptions", form % b"alias", headers=headers)
    assert (await client.answer()).status == 200
    assert instance.talks[0].body == form % b"real-name"


async def test_a_stream_passes_as_it_comes_and_its_first_token_is_content(fleet: StartFleet) -> None:
    go = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.role()
        await go.wait()
        await talk.token("a")
        await talk.event({"choices": [], "usage": USAGE})
        await talk.end_stream()

    intake, _, client = await fleet(script)
    client.chat(stream=True, requests_usage=True)
    assert (await client.head()).headers["transfer-encoding"] == "chunked"
    assert b"assistant" in await client.chunk()
    assert intake.placed_request.first_tokens == 0, "a role is no token"
    go.set()
    assert b'"a"' in await client.chunk()
    await kit.eventually(lambda: intake.placed_request.first_tokens == 1)
    assert b"usage" in await client.chunk()
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() == b""
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.finished == [(Outcome.COMPLETED, Usage(prompt_tokens=9, cached_tokens=4))]
    assert intake.placed_request.first_tokens == 1


@pytest.mark.parametrize("requests_usage", [True, False])
async def test_a_stream_cut_anywhere_passes_unchanged(fleet: StartFleet, requests_usage: bool) -> None:
    async def script(talk: Talk) -> None:
        wire = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        for text in ("a", "b"):
            event = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode()
            wire += b"%x\r\n%b\r\n" % (len(event), event)
        wire += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        for byte in wire:
            await talk.send(bytes([byte]))
            await asyncio.sleep(0)

    intake, _, client = await fleet(script)
    for _ in range(2):
        client.chat(stream=True, requests_usage=requests_usage)
        answer = await client.answer()
        assert answer.whole
        assert answer.body == b"".join(
            [
                b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
                b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n',
                b"data: [DONE]\n\n",
            ]
        )
    assert [placed.first_tokens for placed in intake.placed_requests] == [1, 1]


# usage ---------------------------------------------------------------------------------------------------------
USAGE_EVENT = {"id": "c", "choices": [], "usage": USAGE}


async def test_a_streams_usage_is_asked_for_and_kept_from_a_client_that_did_not_ask(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.event(USAGE_EVENT)
        await talk.end_stream()

    intake, [instance], client = await fleet(script, must_be_asked=True)
    client.chat(stream=True)
    answer = await client.answer()
    assert orjson.loads(instance.talks[0].body)["stream_options"] == {"include_usage": True}
    assert answer.whole and b"usage" not in answer.body
    assert answer.body.endswith(b'"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n')
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.finished == [(Outcome.COMPLETED, Usage(prompt_tokens=9, cached_tokens=4))]


@pytest.mark.parametrize("cut", [1, 7, 50, 1000])
async def test_usage_is_taken_out_however_its_event_is_cut(fleet: StartFleet, cut: int) -> None:
    tokens = [b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text for text in (b"a", b'\\"usage\\":', b"c")]
    events = [*tokens, b"data: " + orjson.dumps(USAGE_EVENT) + b"\n\n", b"data: [DONE]\n\n"]

    async def script(talk: Talk) -> None:
        wire = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        wire += b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
        for start in range(0, len(wire), cut):
            await talk.send(wire[start : start + cut])
            await asyncio.sleep(0)

    _, _, client = await fleet(script, must_be_asked=True)
    for _ in range(2):
        client.chat(stream=True)
        answer = await client.answer()
        assert answer.whole and answer.body == b"".join([*tokens, events[-1]])


def engine(*, forced: bool, continuous: bool = False, fingerprint: str | None = None) -> Any:
    """Streams as vLLM does: with usage where it is asked for or ``forced``, and the fingerprint in the last event."""

    async def script(talk: Talk) -> None:
        asked = orjson.loads(talk.body).get("stream_options", {}).get("include_usage", False)
        sends, beside = asked or forced, {"usage": {"prompt_tokens": 9}} if continuous and forced else {}
        last = {} if fingerprint is None else {"system_fingerprint": fingerprint}
        await talk.begin_stream()
        await talk.event({"choices": [{"index": 0, "delta": {"content": "a"}}], **beside})
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **beside}
        await talk.event(end if sends else {**end, **last})
        if sends:
            await talk.event({**USAGE_EVENT, **last})
        await talk.end_stream()

    return script


@pytest.mark.parametrize("continuous", [True, False])
async def test_usage_that_an_instance_sends_unasked_is_the_clients(fleet: StartFleet, continuous: bool) -> None:
    intake, [instance], client = await fleet(engine(forced=True, continuous=continuous))
    for _ in range(3):
        client.chat(stream=True)
        answer = await client.answer()
        assert orjson.dumps(USAGE_EVENT) in answer.body
    assert all(b"stream_options" not in talk.body for talk in instance.talks)
    await kit.eventually(lambda: len(intake.placed_requests[-1].finished) == 1)
    assert intake.placed_requests[-1].finished[0][1] == Usage(prompt_tokens=9, cached_tokens=4)


async def test_an_instance_is_asked_for_usage_once_a_stream_has_shown_that_it_must_be(fleet: StartFleet) -> None:
    _, [instance], client = await fleet(engine(forced=False))
    bodies = []
    for _ in range(3):
        client.chat(stream=True)
        bodies.append((await client.answer()).body)
    assert [b"stream_options" in talk.body for talk in instance.talks] == [False, True, True]
    assert len(set(bodies)) == 1 and b"usage" not in bodies[0]


async def test_an_instance_that_counts_beside_its_choices_does_so_unasked_and_loses_no_byte(fleet: StartFleet) -> None:
    """vLLM whose operator forces usage after it was known as one that is asked."""
    _, [instance], client = await fleet(engine(forced=True, continuous=True), must_be_asked=True)
    for _ in range(2):
        client.chat(stream=True)
        assert orjson.dumps(USAGE_EVENT) in (await client.answer()).body
    assert [b"stream_options" in talk.body for talk in instance.talks] == [True, False]


async def test_an_instance_whose_connection_broke_may_have_been_restarted_with_other_options(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        if len(instance.talks) == 1:
            talk.reset()
        else:
            await engine(forced=True)(talk)

    _, [instance], client = await fleet(script, must_be_asked=True)
    client.chat(stream=True)
    assert (await client.answer()).status == 502
    client.chat(stream=True)
    assert orjson.dumps(USAGE_EVENT) in (await client.answer()).body


async def test_asking_for_usage_takes_no_fingerprint_from_the_client(fleet: StartFleet) -> None:
    _, [instance], client = await fleet(engine(forced=False, fingerprint="vllm-0.32-tp1"))
    bodies = []
    for _ in range(2):
        client.chat(stream=True)
        bodies.append((await client.answer()).body)
    assert [b"stream_options" in talk.body for talk in instance.talks] == [False, True]
    assert bodies[0] == bodies[1] and b'"system_fingerprint":"vllm-0.32-tp1"' in bodies[0]


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None])
async def test_what_a_client_says_of_usage_itself_is_left_as_it_is(fleet: StartFleet, options: Any) -> None:
    _, [instance], client = await fleet(whole_stream)
    message = {"role": "user", "content": "hi"}
    body = orjson.dumps({"model": "m", "stream": True, "messages": [message], "stream_options": options})
    client.request(kit.CHAT, body)
    answer = await client.answer()
    assert instance.talks[0].body == body
    assert orjson.dumps({"choices": [], "usage": USAGE}) in answer.body


async def test_usage_is_not_asked_for_where_the_settings_say_so(fleet: StartFleet) -> None:
    _, [instance], client = await fleet(whole_stream, settings={"ask_usage": False})
    client.chat(stream=True)
    answer = await client.answer()
    assert b"stream_options" not in instance.talks[0].body and b"usage" in answer.body


async def test_a_stream_that_breaks_inside_of_an_event_still_ends_in_an_error_event(fleet: StartFleet) -> None:
    async def die(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.send(b'40\r\ndata: {"choi')
        await asyncio.sleep(0.02)
        talk.reset()

    _, _, client = await fleet(die, must_be_asked=True)
    client.chat(stream=True)
    answer = await client.answer()
    assert not answer.whole
    assert [orjson.loads(event[6:]).keys() for event in answer.body.split(b"\n\n")[:-1]] == [{"choices"}, {"error"}]


async def test_a_stream_of_announced_length_keeps_all_of_its_bytes(fleet: StartFleet) -> None:
    events = b"data: " + orjson.dumps(USAGE_EVENT) + b"\n\n" + b"data: [DONE]\n\n"

    async def script(talk: Talk) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
        await talk.send(head % len(events) + events)

    _, _, client = await fleet(script)
    client.chat(stream=True)
    assert (await client.answer()).body == events


# answers that are the client's fault ---------------------------------------------------------------------------
async def test_a_client_error_of_the_instance_passes_and_is_not_tried_elsewhere(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer({"error": {"message": "prompt too long", "code": 400}}, status=400)

    intake, [_, other], client = await fleet(script, whole_answer)
    client.chat()
    answer = await client.answer()
    assert answer.status == 400 and answer.json()["error"]["message"] == "prompt too long"
    assert intake.placed_request.outcome is Outcome.CLIENT_ERROR and not other.talks


async def test_a_client_error_inside_a_stream_is_the_clients_own(fleet: StartFleet) -> None:
    """vLLM checks sampling parameters when the stream has begun."""

    async def refuse_late(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.event({"error": {"message": "top_k must be -1", "type": "BadRequestError", "code": 400}})
        await talk.end_stream()

    intake, [_, other], client = await fleet(refuse_late, whole_stream)
    client.chat(stream=True)
    answer = await client.answer()
    assert answer.status == 200 and b"top_k must be -1" in answer.body and answer.body.endswith(b"[DONE]\n\n")
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.finished == [(Outcome.CLIENT_ERROR, None)] and not other.talks


@pytest.mark.parametrize("status", [501, 505])
async def test_what_no_instance_can_do_is_not_tried_elsewhere(fleet: StartFleet, status: int) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer({"error": {"message": "best_of is not supported", "code": status}}, status=status)

    intake, [_, other], client = await fleet(script, whole_answer)
    client.chat()
    answer = await client.answer()
    assert answer.status == status and answer.json()["error"]["message"] == "best_of is not supported"
    assert intake.placed_request.outcome is Outcome.CLIENT_ERROR and not other.talks


async def test_informational_answers_are_skipped(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        await talk.answer({"ok": 1})

    _, _, client = await fleet(script)
    client.chat()
    answer = await client.answer()
    assert answer.json() == {"ok": 1} and "link" not in answer.headers


async def test_an_answer_that_ends_with_the_connection_is_framed_for_the_client(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n")
        await talk.send(b'{"a":')
        await talk.send(b"1}")
        talk.writer.close()

    intake, _, client = await fleet(script)
    for _ in range(2):
        client.chat()
        answer = await client.answer()
        assert answer.whole and answer.json() == {"a": 1}
    assert {placed.outcome for placed in intake.placed_requests} == {Outcome.COMPLETED}


async def test_an_http_10_client_gets_a_stream_without_chunks(fleet: StartFleet) -> None:
    _, _, client = await fleet(whole_stream)
    body = orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]})
    client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (kit.CHAT.encode(), len(body), body))
    answer = await client.answer()
    assert answer.headers["connection"] == "close" and "transfer-encoding" not in answer.headers
    assert answer.body.startswith(b"data: {") and answer.body.endswith(b"data: [DONE]\n\n")


async def test_paths_beside_the_scheduled_ones_are_passed_with_their_query(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(whole_answer)
    client.request("/v1/embeddings?x=y", {"model": "m", "input": "hi"})
    assert (await client.answer()).status == 200
    assert instance.talks[0].head.startswith(b"POST /v1/embeddings?x=y HTTP/1.1\r\n")
    assert intake.requests[0].path == "/v1/embeddings"


async def test_connections_to_an_instance_are_kept_and_reused(fleet: StartFleet) -> None:
    _, [instance], client = await fleet(whole_stream)
    for _ in range(5):
        client.chat(stream=True)
        assert (await client.answer()).whole
    assert instance.connections == 1


async def test_an_answer_that_has_begun_keeps_nothing_of_its_request_in_memory(fleet: StartFleet) -> None:
    prompt_bytes, go = 8 << 20, asyncio.Event()

    async def script(talk: Talk) -> None:
        talk.body = b""
        await talk.begin_stream()
        await talk.token("a")
        await go.wait()
        await talk.end_stream()

    _, _, client = await fleet(script, settings={"max_body_bytes": 2 * prompt_bytes})
    tracemalloc.start()
    try:
        messages = [{"role": "user", "content": "x" * prompt_bytes}]
        client.request(kit.CHAT, {"model": "m", "stream": True, "messages": messages})
        del messages
        await client.head()
        await client.chunk()
        assert tracemalloc.get_traced_memory()[0] < prompt_bytes / 2
    finally:
        tracemalloc.stop()
    go.set()
    assert (await client.chunk()) == b"data: [DONE]\n\n"


# failures before the first byte --------------------------------------------------------------------------------
async def close_silently(talk: Talk) -> None:
    talk.writer.close()


async def reset(talk: Talk) -> None:
    talk.reset()


async def die_after_head(talk: Talk) -> None:
    await talk.begin_stream()
    talk.reset()


async def die_in_first_event(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.send(b'40\r\ndata: {"choices"')
    talk.reset()


async def unavailable(talk: Talk) -> None:
    await talk.answer({"error": {"message": "busy"}}, status=503)


async def internal_error(talk: Talk) -> None:
    await talk.answer({"error": {"message": "engine dead"}}, status=500)


async def too_many(talk: Talk) -> None:
    await talk.answer({"error": {"message": "later"}}, status=429, extra="retry-after: 7\r\n")


async def error_event_first(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.event({"error": {"message": "engine dead", "type": "InternalServerError", "code": 500}})
    await talk.end_stream()


async def not_http(talk: Talk) -> None:
    await talk.send(b"SSH-2.0-OpenSSH_9.6\r\n")


async def endless_head(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1000) for n in range(80)))


async def smuggled_head(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc")


async def unknown_coding(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n")


async def status_below_100(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 099 X\r\n\r\n")


async def status_over_599(talk: Talk) -> None:
    await talk.answer(status=600)


async def empty_stream(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.send(b"0\r\n\r\n")


async def unavailable_and_stuck(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 503 X\r\ncontent-length: 100\r\n\r\nhalf")
    talk.writer.close()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (close_silently, FailureKind.CLOSED),
        (reset, FailureKind.CLOSED),
        (die_after_head, FailureKind.CLOSED),
        (die_in_first_event, FailureKind.CLOSED),
        (unavailable, FailureKind.STATUS),
        (internal_error, FailureKind.STATUS),
        (too_many, FailureKind.STATUS),
        (unavailable_and_stuck, FailureKind.STATUS),
        (error_event_first, FailureKind.STATUS),
        (not_http, FailureKind.PROTOCOL),
        (endless_head, FailureKind.PROTOCOL),
        (smuggled_head, FailureKind.PROTOCOL),
        (unknown_coding, FailureKind.PROTOCOL),
        (status_below_100, FailureKind.PROTOCOL),
        (status_over_599, FailureKind.PROTOCOL),
        (empty_stream, FailureKind.TRUNCATED),
    ],
)
async def test_an_instance_that_fails_before_the_first_byte_costs_the_client_nothing(
    fleet: StartFleet, script: Script, kind: FailureKind
) -> None:
    intake, [bad, good], client = await fleet(script, whole_stream)
    client.chat(stream=True)
    answer = await client.answer()
    assert answer.status == 200 and answer.whole and answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.headers["x-dualmap-instance"] == "i1" and answer.headers["x-dualmap-attempts"] == "2"
    assert "x-dualmap-expected-ttft-ms" not in answer.headers, "it was of the first try"
    placed = intake.placed_request
    assert [failure.kind for failure in placed.failures] == [kind]
    assert placed.outcome is Outcome.COMPLETED and len(placed.finished) == 1
    assert len(bad.talks) == len(good.talks) == 1
    assert bad.talks[0].body == good.talks[0].body
    if kind is not FailureKind.STATUS and script is not empty_stream:  # those may serve again
        await kit.eventually(lambda: bad.open == 0)


async def test_a_replica_without_descriptors_refuses_and_blames_no_instance(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake, instances, client = await fleet(whole_answer, whole_answer)

    async def no_descriptor_left(*_: object, **__: object) -> None:
        raise OutOfFilesError("no file descriptor left", retry_after_s=1.0)

    monkeypatch.setattr(UpstreamPool, "connect", no_descriptor_left)
    client.chat()
    answer = await client.answer()

    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "out_of_files", "1")
    assert intake.placed_request.failures == [] and intake.placed_request.outcome is Outcome.REFUSED
    assert [instance.connections for instance in instances] == [0, 0]


async def test_a_port_where_nobody_listens_is_a_connect_failure(
    start_instance: StartInstance, start_router: StartRouter
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead_url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        good = await start_instance(whole_answer)
        intake = kit.Intake([dead_url, good.url])
        client = await (await start_router(intake)).connect()
        client.chat()
        assert (await client.answer()).status == 200
    assert intake.placed_request.failures[0].kind is FailureKind.CONNECT


async def test_when_every_instance_fails_the_last_ones_own_error_is_the_answer(fleet: StartFleet) -> None:
    intake, _, client = await fleet(reset, too_many)
    client.chat()
    answer = await client.answer()
    assert answer.status == 429 and answer.json()["error"]["message"] == "later"
    assert answer.headers["retry-after"] == "7" and answer.headers["x-dualmap-attempts"] == "2"
    assert intake.placed_request.finished == [(Outcome.UPSTREAM_FAILED, None)]
    client.chat()
    assert (await client.answer()).status == 429, "the connection is still good"


async def test_an_error_event_that_nobody_could_avoid_becomes_an_error_answer(fleet: StartFleet) -> None:
    _, _, client = await fleet(error_event_first)
    client.chat(stream=True)
    answer = await client.answer()
    assert answer.status == 500 and answer.json()["error"]["message"] == "engine dead"
    assert answer.headers["content-type"] == "application/json"


async def test_when_every_instance_is_gone_the_answer_is_a_502_in_openais_form(fleet: StartFleet) -> None:
    intake, _, client = await fleet(reset, close_silently)
    client.chat(headers="x-request-id: r1\r\n")
    answer = await client.answer()
    assert answer.status == 502 and answer.error["code"] == "upstream_failed"
    assert answer.headers["x-request-id"] == "r1"
    assert intake.placed_request.finished == [(Outcome.UPSTREAM_FAILED, None)]


async def test_a_request_that_nobody_answers_is_refused_by_the_id_that_the_fleet_gave_it(fleet: StartFleet) -> None:
    intake, _, client = await fleet(reset, renamed="r1-2")
    client.chat(headers="x-request-id: r1\r\n")
    answer = await client.answer()
    assert answer.status == 502 and answer.headers["x-request-id"] == "r1-2"
    intake.refusal = UnavailableError("nobody is ready")
    intake.refusal.request_id = "r1-3"
    client.chat(headers="x-request-id: r1\r\n")
    answer = await client.answer()
    assert answer.status == 503 and answer.headers["x-request-id"] == "r1-3"


@pytest.fixture
def died_unseen(start_instance: StartInstance, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A router with a kept connection that its instance has reset, which it does not see before it writes again; and
    the instance, which goes on listening or does not."""
    monkeypatch.setattr("dualmap.router.http.sending.IDLE_DEATH_S", math.inf)  # however slow this machine is

    async def start(*, listens: bool) -> Any:
        instance = await start_instance(whole_answer)
        intake = kit.Intake([instance.url])
        router = await start_router(intake)
        client = await router.connect()
        client.chat()
        assert (await client.answer()).status == 200
        [kept] = router.plane.upstreams._idle[instance.url]
        kept._transport.pause_reading()
        linger = struct.pack("ii", 1, 0)
        instance.talks[0].writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        instance.talks[0].reset()
        await kit.eventually(lambda: instance.open == 0)
        if not listens:
            await instance.stop()
        return intake, instance, client

    return start


async def test_a_kept_connection_that_died_unseen_is_replaced_without_a_retry(died_unseen: Any) -> None:
    intake, instance, client = await died_unseen(listens=True)
    client.chat()
    assert (await client.answer()).status == 200
    assert (instance.connections, len(instance.talks)) == (2, 2)
    assert [placed.failures for placed in intake.placed_requests] == [[], []]


async def test_a_kept_connection_that_broke_and_cannot_be_replaced_may_have_carried_work(died_unseen: Any) -> None:
    intake, _, client = await died_unseen(listens=False)
    client.chat()
    assert (await client.answer()).status == 502
    [failure] = intake.placed_requests[1].failures
    assert failure.kind is FailureKind.CLOSED and failure.wasted_work, "the retry budget must be asked"


async def test_a_request_that_was_computed_on_a_kept_connection_is_not_sent_to_the_same_instance_again(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualmap.router.http.sending.IDLE_DEATH_S", 0.0)  # however soon it broke, it was not at once

    async def answer_once_per_connection(talk: Talk) -> None:
        await talk.answer({"ok": 1})
        await talk.reader.readuntil(b"\r\n\r\n")  # the next request came and is being computed
        talk.reset()

    intake, [killed, other], client = await fleet(answer_once_per_connection, whole_answer)
    for _ in range(2):
        client.chat()
        assert (await client.answer()).status == 200
    assert len(killed.talks) == 1 and len(other.talks) == 1
    assert [failure.kind for failure in intake.placed_requests[1].failures] == [FailureKind.CLOSED]


@pytest.mark.parametrize("listens", [True, False])
async def test_accepted_then_closed_is_no_death_while_the_port_accepts(fleet: StartFleet, listens: bool) -> None:
    async def close(talk: Talk) -> None:
        if not listens:
            instances[0].close_port()
        talk.reset()

    intake, instances, client = await fleet(close, whole_answer)
    client.chat()
    assert (await client.answer()).status == 200
    [failure] = intake.placed_request.failures
    assert failure.kind is FailureKind.CLOSED
    assert failure.engine_died is not listens


async def test_a_hanging_instance_is_left_after_the_first_byte_timeout(fleet: StartFleet) -> None:
    async def hang(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.until_closed()

    intake, [stuck, _], client = await fleet(hang, whole_stream, settings={"first_byte_timeout_s": 0.2})
    client.chat(stream=True)
    assert (await client.answer()).whole
    assert intake.placed_request.failures[0].kind is FailureKind.TIMEOUT
    await kit.eventually(lambda: stuck.open == 0)


async def test_an_answer_that_does_not_stream_is_not_computed_again_after_its_timeout(fleet: StartFleet) -> None:
    async def compute(talk: Talk) -> None:
        await talk.until_closed()

    intake, [stuck, other], client = await fleet(compute, whole_answer, settings={"first_byte_timeout_s": 0.2})
    client.chat()
    answer = await client.answer()
    assert answer.status == 504 and answer.error["code"] == "upstream_timeout"
    assert "router.first_byte_timeout_s" in answer.error["message"]
    assert intake.placed_request.finished == [(Outcome.TIMED_OUT, None)] and not other.talks
    await kit.eventually(lambda: stuck.open == 0)


@pytest.fixture
def down_view() -> Any:
    """The view in which the first instance was taken down and another one is ready."""
    states = {"i0": InstanceState.DOWN, "i1": InstanceState.READY}
    instances = {name: InstanceSpec(name, f"http://{name}", state=state) for name, state in states.items()}
    return ClusterView.build(epoch=2, tree_version=0, instances=instances, tree=HotnessTree(), virtual_nodes=4)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_hanging_instance_is_left_when_the_fleet_takes_it_down(
    fleet: StartFleet, down_view: Any, stream: bool
) -> None:
    async def hang(talk: Talk) -> None:
        if stream:
            await talk.begin_stream()
        await talk.until_closed()

    intake, [stuck, _], client = await fleet(hang, whole_stream if stream else whole_answer)
    client.chat(stream=stream)
    await kit.eventually(lambda: stuck.talks)

    intake.loss_notifier.check(down_view)

    answer = await client.answer()
    assert answer.whole and answer.headers["x-dualmap-instance"] == "i1"
    assert intake.placed_request.failures[0].kind is FailureKind.DOWN
    await kit.eventually(lambda: stuck.open == 0)
    assert not intake.loss_notifier._listeners


async def test_a_stream_that_has_begun_is_not_taken_from_an_instance_that_went_down(
    fleet: StartFleet, down_view: Any
) -> None:
    resumed = asyncio.Event()

    async def pause(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.role()
        await resumed.wait()
        await talk.end_stream()

    intake, _, client = await fleet(pause, whole_stream)
    client.chat(stream=True)
    await client.head()
    await client.chunk()

    intake.loss_notifier.check(down_view)
    resumed.set()

    assert b"[DONE]" in await client.chunk()
    await kit.eventually(lambda: intake.placed_request.finished)
    assert intake.placed_request.outcome is Outcome.COMPLETED and intake.placed_request.failures == []
    assert not intake.loss_notifier._listeners


@pytest.fixture
def begun_stream(fleet: StartFleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stream whose client has its first event, and that says no more until told; short times."""
    monkeypatch.setattr("dualmap.router.http.exchange.SILENT_S", 0.2)

    async def start() -> Any:
        resumed = asyncio.Event()

        async def pause(talk: Talk) -> None:
            await talk.begin_stream()
            await talk.role()
            await resumed.wait()
            await talk.end_stream()

        intake, [instance, _], client = await fleet(
            pause, whole_stream, settings={"client_timeout_s": 0.2}
        )  # swept often
        client.chat(stream=True)
        await client.head()
        await client.chunk()
        return intake, instance, client, resumed

    return start


async def until_error_event(client: Any, tick: Any = lambda: None) -> dict[str, object]:
    reading = asyncio.ensure_future(client.chunk())
    while not reading.done():
        tick()
        await asyncio.sleep(0.01)
    error = orjson.loads((await reading).removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_failed"
    assert await client.closed()
    return error


async def test_a_stream_that_falls_silent_on_an_instance_that_is_down_ends_in_an_error(
    begun_stream: Any, down_view: Any
) -> None:
    intake, stuck, client, resumed = await begun_stream()

    error = await until_error_event(client, tick=lambda: intake.loss_notifier.check(down_view))

    assert "instance i0 is down" in error["message"]
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED
    resumed.set()
    await kit.eventually(lambda: stuck.open == 0)


async def test_a_stream_that_falls_silent_behind_a_closed_port_ends_in_an_error(begun_stream: Any) -> None:
    intake, stuck, client, resumed = await begun_stream()
    stuck.close_port()

    error = await until_error_event(client)

    assert "closed its port" in error["message"]
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED
    resumed.set()
    await kit.eventually(lambda: stuck.open == 0)


async def test_a_silent_stream_of_an_instance_that_listens_is_waited_for(begun_stream: Any) -> None:
    _, instance, client, resumed = await begun_stream()
    await kit.eventually(lambda: instance.connections > 2)  # its port was asked, again and again

    resumed.set()

    assert b"[DONE]" in await client.chunk()


async def test_an_error_answer_that_never_ends_is_not_waited_for(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualmap.router.http.exchange.ERROR_BODY_S", 0.1)

    async def half_an_error(talk: Talk) -> None:
        await talk.send(b"HTTP/1.1 503 X\r\ncontent-length: 100\r\n\r\nhalf")
        await talk.until_closed()

    intake, _, client = await fleet(half_an_error, whole_answer, settings={"chunk_timeout_s": 1.0})
    client.chat()
    assert (await client.answer()).status == 200
    assert (intake.placed_request.failures[0].kind, intake.placed_request.failures[0].status) == (
        FailureKind.STATUS,
        503,
    )


async def test_the_time_for_the_whole_request_ends_all_tries(fleet: StartFleet) -> None:
    async def hang(talk: Talk) -> None:
        await talk.until_closed()

    intake, [_, other], client = await fleet(hang, whole_answer, settings={"total_timeout_s": 0.2})
    client.chat()
    answer = await client.answer()
    assert answer.status == 504 and answer.error["code"] == "upstream_timeout"
    assert "router.total_timeout_s" in answer.error["message"]
    assert intake.placed_request.finished == [(Outcome.TIMED_OUT, None)] and not other.talks


# instances that lie --------------------------------------------------------------------------------------------
async def redirects(talk: Talk) -> None:
    await talk.answer({}, status=302, extra="location: http://elsewhere/\r\n")


async def wants_a_key(talk: Talk) -> None:
    await talk.answer({"error": {"message": "unauthorized", "code": 401}}, status=401)


async def knows_no_such_path(talk: Talk) -> None:
    await talk.answer({"detail": "Not Found"}, status=404)


async def nothing(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n")


async def nothing_in_chunks(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")


async def no_content(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 204 No Content\r\n\r\n")


async def a_page(talk: Talk) -> None:
    page = b"<html><body>It works!</body></html>"
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))


async def an_error_under_200(talk: Talk) -> None:
    await talk.answer({"error": {"message": "out of memory", "code": 500}})


async def aborts(talk: Talk) -> None:
    await talk.answer({"object": "chat.completion", "choices": [{"message": {}, "finish_reason": "abort"}]})


async def aborts_at_once(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
    await talk.end_stream()


async def a_stream_of_nothing(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.send(b"0\r\n\r\n")


async def half_a_body(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
    talk.writer.close()


BEFORE_THE_FIRST_BYTE = [
    (redirects, FailureKind.STATUS),
    (wants_a_key, FailureKind.STATUS),
    (knows_no_such_path, FailureKind.STATUS),
    (nothing, FailureKind.NO_ANSWER),
    (nothing_in_chunks, FailureKind.NO_ANSWER),
    (no_content, FailureKind.NO_ANSWER),
    (a_page, FailureKind.NO_ANSWER),
    (an_error_under_200, FailureKind.STATUS),
    (aborts, FailureKind.ABORTED),
    (aborts_at_once, FailureKind.ABORTED),
    (a_stream_of_nothing, FailureKind.TRUNCATED),
    (half_a_body, FailureKind.CLOSED),
]


@pytest.mark.parametrize(("lie", "kind"), BEFORE_THE_FIRST_BYTE)
async def test_where_an_instance_lies_before_the_first_byte_another_one_answers(
    fleet: StartFleet, lie: Any, kind: FailureKind
) -> None:
    intake, _, client = await fleet(lie, whole_answer)
    client.chat()
    answer = await client.answer()
    assert (answer.status, answer.headers["x-dualmap-instance"]) == (200, "i1")
    assert [failure.kind for failure in intake.placed_request.failures] == [kind]
    assert intake.placed_request.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("refusal", "status"), [(redirects, 302), (wants_a_key, 401), (knows_no_such_path, 404), (a_page, 200)]
)
async def test_what_all_instances_say_reaches_the_client_as_it_came(
    fleet: StartFleet, refusal: Any, status: int
) -> None:
    _, instances, client = await fleet(refusal, refusal, refusal)
    client.chat()
    answer = await client.answer()
    assert answer.status == status
    assert answer.headers["x-dualmap-attempts"] == "3"
    assert answer.body and b"no instance could answer" not in answer.body
    if status == 302:
        assert answer.headers["location"] == "http://elsewhere/"
    assert [len(instance.talks) for instance in instances] == [1, 1, 1]


async def test_a_refusal_says_more_than_a_connection_that_is_refused_after_it(fleet: StartFleet) -> None:
    _, [_, dead], client = await fleet(knows_no_such_path, whole_answer)
    await dead.stop()
    client.chat()
    answer = await client.answer()
    assert answer.status == 404 and orjson.loads(answer.body) == {"detail": "Not Found"}


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_the_clients_own_error_is_asked_once(fleet: StartFleet, status: int) -> None:
    async def refuse(talk: Talk) -> None:
        await talk.answer({"error": {"message": "bad", "code": status}}, status=status)

    intake, [_, other], client = await fleet(refuse, whole_answer)
    client.chat()
    assert (await client.answer()).status == status
    assert not other.talks and intake.placed_request.outcome is Outcome.CLIENT_ERROR


async def test_an_answer_that_is_bytes_is_no_lie(fleet: StartFleet) -> None:
    async def embed(talk: Talk) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: 3\r\n\r\n"
        await talk.send(head + b"\x00<h")

    _, [_, other], client = await fleet(embed, whole_answer)
    client.chat()
    assert (await client.answer()).body == b"\x00<h" and not other.talks


async def test_a_pause_that_an_instance_asks_for_is_read(fleet: StartFleet) -> None:
    async def busy(talk: Talk) -> None:
        await talk.answer({"error": {"code": 429}}, status=429, extra="retry-after: 17\r\n")

    intake, _, client = await fleet(busy, whole_answer)
    client.chat()
    assert (await client.answer()).status == 200
    assert [failure.pause_s for failure in intake.placed_request.failures] == [17.0]


async def test_a_stream_without_its_end_is_broken_off_and_held_against_its_instance(fleet: StartFleet) -> None:
    async def stop_short(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await asyncio.sleep(0.02)
        await talk.send(b"0\r\n\r\n")

    intake, [_, other], client = await fleet(stop_short, whole_stream)
    client.chat(stream=True)
    answer = await client.answer()
    assert not answer.whole and b"the stream ended before the answer did" in answer.body
    assert [fault.kind for fault in intake.placed_request.faults] == [FailureKind.TRUNCATED]
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED and not other.talks


async def test_a_stream_that_its_instance_aborts_is_held_against_it(fleet: StartFleet) -> None:
    async def abort(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await asyncio.sleep(0.02)
        await talk.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
        await talk.end_stream()

    intake, _, client = await fleet(abort)
    client.chat(stream=True)
    assert (await client.answer()).whole
    assert [fault.kind for fault in intake.placed_request.faults] == [FailureKind.ABORTED]
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED


# failures behind the first byte --------------------------------------------------------------------------------
async def test_a_stream_that_breaks_off_ends_in_an_error_event_and_no_done(fleet: StartFleet) -> None:
    async def die(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await asyncio.sleep(0.02)  # let the token out: a reset overtakes it
        talk.reset()

    intake, [_, other], client = await fleet(die, whole_stream)
    client.chat(stream=True)
    answer = await client.answer()
    assert not answer.whole and b"[DONE]" not in answer.body
    error = orjson.loads(answer.body.split(b"\n\n")[1].removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_failed"
    assert intake.placed_request.finished == [(Outcome.UPSTREAM_FAILED, None)]
    assert [fault.engine_died for fault in intake.placed_request.faults] == [True]
    assert not other.talks


async def test_an_engine_that_dies_under_a_stream_is_told_from_one_that_fails_it(fleet: StartFleet) -> None:
    def ending_with(message: str) -> Any:
        async def script(talk: Talk) -> None:
            await talk.begin_stream()
            await talk.token("a")
            await talk.event({"error": {"message": message, "type": "InternalServerError", "code": 500}})
            await talk.end_stream()

        return script

    for message, died in (("EngineCore encountered an issue. See stack trace", True), ("a bug", False)):
        intake, _, client = await fleet(ending_with(message))
        client.chat(stream=True)
        assert b"[DONE]" in (await client.answer()).body
        await kit.eventually(lambda intake=intake: bool(intake.placed_request.finished))
        assert [fault.engine_died for fault in intake.placed_request.faults] == [died]
        assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED


async def test_a_stream_that_breaks_inside_of_a_chunk_is_broken_for_the_client_too(fleet: StartFleet) -> None:
    async def die(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.send(b'40\r\ndata: {"choi')
        await asyncio.sleep(0.02)
        talk.reset()

    _, _, client = await fleet(die)
    client.chat(stream=True, requests_usage=True)
    answer = await client.answer()
    assert not answer.whole and b"error" not in answer.body


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_of_announced_length_that_breaks_off_gets_no_further_byte(
    fleet: StartFleet, version: str
) -> None:
    event = b'data: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n'

    async def die(talk: Talk) -> None:
        await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 100\r\n\r\n" + event)
        await asyncio.sleep(0.02)
        talk.reset()

    _, _, client = await fleet(die)
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
    client.send(b"POST %b HTTP/%b\r\nhost: h\r\n" % (kit.CHAT.encode(), version.encode()))
    client.send(b"content-length: %d\r\n\r\n%b" % (len(body), body))
    answer = await client.answer()
    assert not answer.whole and answer.body == event


async def test_an_abort_is_seen_before_its_usage_however_the_end_is_cut(fleet: StartFleet) -> None:
    seen = asyncio.Event()

    async def abort(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        for event in ({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}, {"usage": USAGE}, b"[DONE]"):
            await seen.wait()
            seen.clear()
            await talk.event(event)
        await talk.send(b"0\r\n\r\n")

    intake, _, client = await fleet(abort)
    client.chat(stream=True)
    await client.head()
    for _ in range(3):  # each event is a read of its own
        await client.chunk()
        seen.set()
    assert await client.chunk() == b"data: [DONE]\n\n" and await client.chunk() == b""
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.finished == [(Outcome.UPSTREAM_FAILED, Usage(prompt_tokens=9, cached_tokens=4))]


@pytest.mark.parametrize("size", [5, MAX_HELD_BYTES + 5])
@pytest.mark.parametrize("framing", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_half_an_answer_is_never_taken_for_a_whole_one(fleet: StartFleet, framing: str, size: int) -> None:
    async def die(talk: Talk) -> None:
        await talk.send(f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{framing}\r\n\r\n".encode())
        chunk_size = f"{size:x}\r\n" if "chunked" in framing else ""
        await talk.send(f"{chunk_size}{{{' ' * (size - 1)}\r\n".encode())
        await asyncio.sleep(0.02)
        talk.writer.close()

    intake, [_, other], client = await fleet(die, whole_answer)
    client.chat()
    answer = await client.answer()
    if size > MAX_HELD_BYTES:
        assert not answer.whole and not other.talks
        assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED
    else:  # nothing of it was sent
        assert answer.whole and answer.status == 200
        assert [failure.kind for failure in intake.placed_request.failures] == [FailureKind.CLOSED]


async def test_a_gap_in_a_stream_ends_it(fleet: StartFleet) -> None:
    async def stall(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.until_closed()

    intake, [instance], client = await fleet(stall, settings={"chunk_timeout_s": 0.2})
    client.chat(stream=True)
    answer = await client.answer()
    assert not answer.whole and b"upstream_timeout" in answer.body and b"router.chunk_timeout_s" in answer.body
    assert intake.placed_request.finished == [(Outcome.TIMED_OUT, None)]
    await kit.eventually(lambda: instance.open == 0)


async def test_a_stream_that_the_engine_gave_up_counts_as_failed(fleet: StartFleet) -> None:
    async def give_up(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.event({"error": {"message": "EngineCore died", "code": 500}})
        await talk.end_stream()

    intake, _, client = await fleet(give_up)
    client.chat(stream=True)
    assert (await client.answer()).whole
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED


async def test_bytes_behind_the_end_of_an_answer_never_reach_a_client(fleet: StartFleet) -> None:
    async def two_answers(talk: Talk) -> None:
        await talk.send(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        )

    intake, _, client = await fleet(two_answers, whole_answer)
    client.chat()
    answer = await client.answer()
    assert answer.json()["object"] == "chat.completion"
    assert intake.placed_request.failures[0].kind is FailureKind.PROTOCOL


async def test_line_ends_behind_an_answer_never_reach_a_client(fleet: StartFleet) -> None:
    async def sloppy(talk: Talk) -> None:
        body = b"2\r\n{}\r\n0\r\n\r\n"
        await talk.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"\r\n" * 1000)

    _, [instance], client = await fleet(sloppy)
    for _ in range(2):
        client.chat()
        assert (await client.answer()).json() == {}
    assert instance.connections == 2, "a connection out of step is used again"


async def test_line_ends_before_an_answer_never_reach_a_client(fleet: StartFleet) -> None:
    async def sloppy(talk: Talk) -> None:
        await talk.send(b"\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n\r\n\r\n")
        await talk.answer({"ok": 1})

    _, _, client = await fleet(sloppy)
    client.chat()
    assert (await client.answer()).json() == {"ok": 1}


# clients that leave --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_client_that_leaves_a_stream_frees_the_instance(fleet: StartFleet, leave: str) -> None:
    gone = asyncio.Event()

    async def endless(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.until_closed()
        gone.set()

    intake, [instance], client = await fleet(endless)
    client.chat(stream=True)
    await client.head()
    await client.chunk()
    getattr(client, leave)()
    await asyncio.wait_for(gone.wait(), 60.0)
    assert intake.placed_request.finished == [(Outcome.CLIENT_GONE, None)]
    await kit.eventually(lambda: instance.open == 0)


async def test_a_client_that_leaves_before_the_first_byte_frees_the_instance(fleet: StartFleet) -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def slow(talk: Talk) -> None:
        arrived.set()
        await talk.until_closed()
        gone.set()

    intake, _, client = await fleet(slow)
    client.chat()
    await arrived.wait()
    client.close()
    await asyncio.wait_for(gone.wait(), 60.0)
    assert intake.placed_request.finished == [(Outcome.CLIENT_GONE, None)]


async def test_a_client_that_leaves_while_held_is_forgotten(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(whole_answer, gate=asyncio.Event())
    client.chat()
    await kit.eventually(lambda: bool(intake.requests))
    client.close()
    await kit.eventually(lambda: intake.ended == [Outcome.CLIENT_GONE], within_s=1.0)
    assert not instance.talks and not intake.placed_requests


async def test_a_client_that_leaves_while_its_answer_flows_leaves_no_trace_in_the_log(
    start_instance: StartInstance, start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    async def flood(talk: Talk) -> None:
        await talk.begin_stream()
        while True:
            for _ in range(5):
                await talk.token("word " * 400)
            await asyncio.sleep(0)

    instance = await start_instance(flood)
    intake = kit.Intake([instance.url])
    router = await start_router(intake)

    async def leave() -> None:
        client = await router.connect()
        client.chat(stream=True)
        await client.head()
        client.close()

    await asyncio.gather(*[leave() for _ in range(40)])
    await kit.eventually(lambda: all(placed.finished for placed in intake.placed_requests))
    assert [placed.outcome for placed in intake.placed_requests] == [Outcome.CLIENT_GONE] * 40
    assert not caplog.records


# clients that close their half -----------------------------------------------------------------------------------
@pytest.mark.parametrize("script", [whole_answer, whole_stream])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_closed_its_half_gets_its_whole_answer(
    fleet: StartFleet, script: Script, begun: bool
) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(talk: Talk) -> None:
        if begun:
            await talk.begin_stream()
            await talk.token("a")
        arrived.set()
        await go_on.wait()
        if begun:
            await talk.token("b")
            await talk.end_stream()
        else:
            await script(talk)

    intake, _, client = await fleet(slow)
    client.chat(stream=True)
    await arrived.wait()
    if begun:
        await kit.eventually(lambda: intake.placed_request.first_tokens == 1)
    client.writer.write_eof()
    await asyncio.sleep(0.3)  # until it was asked more than once whether it is there
    go_on.set()
    raw = await asyncio.wait_for(client.reader.read(), 10)
    answer = raw.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or b'"usage"' in answer
    assert (b"\r\nconnection: close\r\n" in answer) is not begun
    assert intake.placed_request.outcome is Outcome.COMPLETED


async def test_requests_pipelined_before_a_client_closed_its_half_are_all_answered(fleet: StartFleet) -> None:
    _, _, client = await fleet(whole_answer)
    for _ in range(3):
        client.chat()
    client.writer.write_eof()
    raw = await asyncio.wait_for(client.reader.read(), 10)
    assert raw.count(b"HTTP/1.1 200 OK") == 3 and raw.count(b"connection: close") == 1


async def test_half_a_request_is_not_waited_for_once_its_client_closed_its_half(fleet: StartFleet) -> None:
    _, _, client = await fleet(whole_answer)
    client.chat()
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
    client.writer.write_eof()
    raw = await asyncio.wait_for(client.reader.read(), 5.0)
    assert raw.count(b"HTTP/1.1 200 OK") == 1


async def test_a_client_of_http_10_that_closes_its_half_counts_as_gone(fleet: StartFleet) -> None:
    """It cannot be asked whether it is there."""
    intake, _, client = await fleet(whole_answer, gate=asyncio.Event())
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % (kit.CHAT.encode(), len(body)) + body)
    await kit.eventually(lambda: bool(intake.requests))
    client.writer.write_eof()
    await kit.eventually(lambda: intake.ended == [Outcome.CLIENT_GONE], within_s=1.0)
    assert await client.closed()


# back-pressure -------------------------------------------------------------------------------------------------
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


# refusals ------------------------------------------------------------------------------------------------------
async def test_a_refused_placement_is_the_answer(fleet: StartFleet) -> None:
    intake, _, client = await fleet(whole_answer, refusal=QueueFullError("all full", retry_after_s=3))
    client.chat(headers="x-request-id: r9\r\n")
    answer = await client.answer()
    assert answer.status == 429 and answer.headers["retry-after"] == "3"
    assert answer.headers["x-request-id"] == "r9" and answer.error["code"] == "queue_full"
    intake.refusal = UnavailableError("nobody is ready")
    client.chat()
    assert (await client.answer()).status == 503


async def test_a_store_that_is_away_is_a_503_and_a_bug_is_a_500_that_tells_nothing(
    fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    intake, _, client = await fleet(whole_answer, refusal=StoreUnavailableError("redis://secret"))
    client.chat()
    answer = await client.answer()
    assert answer.status == 503 and "secret" not in answer.error["message"]
    intake.refusal = KeyError("secret")
    client.chat()
    answer = await client.answer()
    assert answer.status == 500 and "secret" not in answer.error["message"]
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"model":1,"messages":[]}', b'{"model":"m","messages":"x"}']
)
async def test_what_the_router_cannot_read_the_instance_judges(fleet: StartFleet, body: bytes) -> None:
    async def judge(talk: Talk) -> None:
        await talk.answer({"error": {"message": "as the engine says"}}, status=400)

    intake, [instance], client = await fleet(judge)
    client.request(kit.CHAT, body)
    answer = await client.answer()
    assert answer.status == 400 and answer.json()["error"]["message"] == "as the engine says"
    assert instance.talks[0].body == body
    assert intake.placed_request.outcome is Outcome.CLIENT_ERROR


async def test_headers_that_name_or_trace_a_request_do_not_decide_whether_it_is_served(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(whole_answer)
    for fields, request_id in [
        ("x-request-id: a1, b2\r\n", "a1"),
        ("x-request-id: a1\r\nx-request-id: b2\r\n", "a1"),
        ("x-request-id: not legal\r\n", None),
        ('x-request-id: {"a": 1}\r\n', None),
        ("x-slo-ttft-ms: soon\r\ntraceparent: 00-zz\r\npriority: u=x\r\n", None),
    ]:
        client.chat(headers=fields)
        answer = await client.answer()
        assert answer.status == 200
        assert instance.talks[-1].headers["x-request-id"] == answer.headers["x-request-id"]
        assert request_id is None or answer.headers["x-request-id"] == request_id
    assert all(request.slo_s is None for request in intake.requests)


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1//chat///completions", "/v1/chat/completion%73"])
async def test_a_path_is_served_as_the_one_that_is_meant(fleet: StartFleet, path: str) -> None:
    _, [instance], client = await fleet(whole_answer)
    client.request(path, {"model": "m", "messages": [{"role": "user", "content": "q"}]})
    assert (await client.answer()).status == 200
    assert instance.talks[0].head.startswith(b"POST /v1/chat/completions HTTP/1.1")
    client.request("//health/", method="GET")
    assert (await client.answer()).json()["app"] == "/health"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_an_unknown_path_is_the_instances_and_one_that_changes_an_engine_is_refused(
    fleet: StartFleet, method: str
) -> None:
    async def nothing_there(talk: Talk) -> None:
        await talk.answer({"detail": "Not Found"}, status=404)

    intake, [instance], client = await fleet(nothing_there)
    client.request("/v2/brand/new?a=1", method=method)
    answer = await client.answer()
    assert (answer.status, answer.json()) == (404, {"detail": "Not Found"})
    assert instance.talks[0].head.startswith(f"{method} /v2/brand/new?a=1 HTTP/1.1".encode())
    client.request("/update_weights", method=method)
    assert ((refused := await client.answer()).status, refused.error["code"]) == (403, "forbidden_path")
    assert len(intake.requests) == 1


# keys ----------------------------------------------------------------------------------------------------------
async def test_keys_of_the_router_stay_with_the_router(fleet: StartFleet) -> None:
    settings = {"api_keys": ("k1", "k2"), "upstream_api_key": "theirs"}
    intake, [instance], client = await fleet(whole_answer, settings=settings)
    client.chat()
    refused = await client.answer()
    assert refused.status == 401 and refused.error["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    client.chat(headers="authorization: Bearer k2\r\n")
    assert (await client.answer()).status == 200
    assert instance.talks[0].headers["authorization"] == "Bearer theirs"
    assert b"k2" not in instance.talks[0].head
    assert len(intake.requests) == 1


async def test_a_response_gets_an_id_that_names_its_instance(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer({"object": "response"})

    _lifecycle, [instance], client = await fleet(script)
    client.request("/v1/responses", {"model": "m", "input": "hi"})
    assert (await client.answer()).status == 200
    sent = orjson.loads(instance.talks[0].body)
    assert sent["request_id"].startswith("resp_") and sent["request_id"].endswith("@i0")
    assert (sent["model"], sent["input"]) == ("m", "hi")


@pytest.mark.parametrize("sent_id", ["team/42", "a@b", "x=y+z", "1:2"])
async def test_no_character_of_a_clients_id_means_anything_in_a_path_with_the_responses_id(
    fleet: StartFleet, sent_id: str
) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer({"object": "response"})

    intake, [instance], client = await fleet(script)
    client.request("/v1/responses", {"model": "m", "input": "hi"}, headers=f"x-request-id: {sent_id}\r\n")
    answer = await client.answer()
    given = orjson.loads(instance.talks[0].body)["request_id"]
    assert answer.headers["x-request-id"] == sent_id
    assert unquote(given) == given == quote(given, safe="@~")
    client.request(f"/v1/responses/{quote(given)}", method="GET")
    assert (await client.answer()).status == 200
    assert intake.requests[-1].pinned_to == "i0"


async def test_a_stored_response_is_read_and_cancelled_with_the_clients_own_method(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(whole_answer, settings={"api_keys": ("k1",)})
    key = "authorization: Bearer k1\r\n"
    for method, path in (
        ("GET", "/v1/responses/resp_1%40i0?include=x"),
        ("POST", "/v1/responses/resp_1@i0/cancel"),
        ("DELETE", "/v1/responses/resp_1@i0"),
    ):
        client.request(path, method=method, headers=key)
        assert (await client.answer()).status == 200
        assert instance.talks[-1].head.startswith(f"{method} {path} HTTP/1.1\r\n".encode())
    assert [request.pinned_to for request in intake.requests] == ["i0"] * 3

    client.request("/v1/responses/resp_1@i0", method="GET")
    assert (await client.answer()).status == 401
    client.request("/v1/responses/resp_1", method="GET", headers=key)
    assert (await client.answer()).status == 404
    client.request("/v1/responses/resp_1@i0", method="PUT", headers=key)
    refused = await client.answer()
    assert (refused.status, refused.headers["allow"]) == (405, "GET, DELETE, OPTIONS")


async def test_an_answer_that_breaks_in_the_middle_is_no_death_while_the_port_accepts(
    start_instance: StartInstance, start_router: StartRouter
) -> None:
    async def broken(talk: Talk) -> None:
        await talk.send(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{"choices":')
        talk.writer.close()

    async def whole(talk: Talk) -> None:
        await talk.answer({"choices": []})

    instances = [await start_instance(broken), await start_instance(whole)]
    intake = kit.Intake([instance.url for instance in instances])
    client = await (await start_router(intake)).connect()
    client.chat()
    assert (await client.answer()).status == 200
    (failure,) = intake.placed_request.failures
    assert failure.kind is FailureKind.CLOSED and not failure.engine_died
