"""Dispatched: what reaches the instance, byte for byte."""

from __future__ import annotations

import pytest

from dualmap.scheduling.request.outcome import Outcome
from tests.router.http import kit
from tests.router.http.kit import Talk
from tests.router.http.phases.answers import StartFleet, whole_answer, whole_stream

DEEP = b"[" * 900 + b"]" * 900


async def test_a_rank_is_asked_for_by_its_number_and_clients_choose_none(fleet: StartFleet) -> None:
    _, [rank], client = await fleet(whole_answer, rank=3)
    client.chat(headers="x-data-parallel-rank: 1\r\n")
    await client.answer()
    _, [server], client = await fleet(whole_answer)
    client.chat(headers="x-data-parallel-rank: 1\r\n")
    await client.answer()

    assert rank.talks[0].headers["x-data-parallel-rank"] == "3"
    assert "x-data-parallel-rank" not in server.talks[0].headers


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
