"""Requests that decode instances serve whole and give back, over real processes: no client gets half an answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet

DECODE = ("decode-1", "decode-2")
OPTIONS = (
    "--prefill", "1", "--decode", "2", "--replicas", "1", "--workers", "1", "--connector", "mooncake",
    "--scheduling.split.mode", "never",
)  # fmt: skip
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENS = 24


@pytest.fixture(scope="module")
def whole_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("given-back"), (*QUICK, *OPTIONS)) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def nothing_outlives_its_request(whole_fleet: Fleet) -> Iterator[None]:
    yield
    order(whole_fleet, 0)
    whole_fleet.until_idle()
    loads = [each["load"] for each in whole_fleet.instances().values() if each["load"]]
    assert [load["context_tokens"] + load["running_requests"] for load in loads] == [0] * len(loads)


def order(fleet: Fleet, count: int, after_tokens: int = 0) -> None:
    """Each decoder gives its next ``count`` requests back."""
    for name in DECODE:
        fleet.emulator(name, "/emulator/fail", {"count": count, "answer": "recomputed", "after_tokens": after_tokens})


def ask(fleet: Fleet, path: str, number: int, **more: Any) -> tuple[http.client.HTTPResponse, bytes]:
    at = urlsplit(fleet.endpoint)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    text = f"{number:05d} " + "some words of a prompt " * 100
    prompt = {"prompt": text} if path == COMPLETION else {"messages": [{"role": "user", "content": text}]}
    body = {"model": fleet.model, "max_tokens": TOKENS, **prompt, **more}
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        try:
            return response, response.read()
        except http.client.IncompleteRead as broken_off:
            return response, broken_off.partial
    finally:
        connection.close()


def events(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_stream_that_is_given_back_in_the_middle_goes_on(whole_fleet: Fleet, path: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    usage = events(ask(whole_fleet, path, 1, **options)[1])[-1]["usage"]
    order(whole_fleet, 1, after_tokens=5)

    response, body = ask(whole_fleet, path, 1, **options)

    told = [choice for event in events(body) for choice in event.get("choices", [])]
    text = "".join(choice["text"] if path == COMPLETION else choice["delta"].get("content") or "" for choice in told)
    assert response.status == 200
    assert response.headers["x-dualmap-instance"] in DECODE
    assert response.headers["x-dualmap-prefill-instance"] is None
    assert b"recomputed" not in body
    assert body.endswith(b"data: [DONE]\n\n")
    assert len(text) == 4 * TOKENS
    counted, names = events(body)[-1]["usage"], ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [counted[name] for name in names] == [usage[name] for name in names]
    explained = whole_fleet.get(f"/admin/explain/{response.headers['x-request-id']}")
    assert len(explained["failures"]) == 2  # both gave it back, and one of them answered the rest
    assert (explained["outcome"], explained["output_tokens"]) == ("completed", TOKENS)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_answer_that_does_not_stream_is_asked_for_again(whole_fleet: Fleet, path: str) -> None:
    order(whole_fleet, 1, after_tokens=5)

    response, body = ask(whole_fleet, path, 2)

    assert response.status == 200, body
    assert response.headers["x-dualmap-attempts"] == "3"
    assert json.loads(body)["usage"]["completion_tokens"] == TOKENS
    assert b"recomputed" not in body


def test_several_answers_in_one_stream_go_on_each(whole_fleet: Fleet) -> None:
    order(whole_fleet, 1, after_tokens=5)

    _, body = ask(whole_fleet, COMPLETION, 3, stream=True, n=2)

    texts = {0: "", 1: ""}
    for choice in (choice for event in events(body) for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
    assert {len(text) for text in texts.values()} == {4 * TOKENS}
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"recomputed" not in body
