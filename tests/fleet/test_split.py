"""Split requests over real processes: two instances serve one request, and nothing outlives it."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import QUICK
from fleet_process import Fleet, running_fleet, until

PREFILL, DECODE = ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
SPLIT = (
    "--prefill", "2", "--decode", "2", "--replicas", "1", "--workers", "1",
    "--scheduling.split.mode", "always", "--emulator.transfer.latency_ms", "2000",
)  # fmt: skip
"""At a time scale of 20, a transfer takes 0.1 s."""


@pytest.fixture(scope="module")
def split_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("split"), (*QUICK, *SPLIT)) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def nothing_outlives_its_request(split_fleet: Fleet) -> Iterator[None]:
    until(lambda: all(each["state"] == "ready" for each in split_fleet.instances().values()), "all are ready")
    yield
    split_fleet.until_idle()
    until(lambda: statistics(split_fleet, "staged") == 0, "no KV stays staged")
    until(lambda: statistics(split_fleet, "running") + statistics(split_fleet, "waiting") == 0, "nothing is computed")
    loads = [each["load"] for each in split_fleet.instances().values() if each["load"]]
    assert [load["context_tokens"] + load["running_requests"] for load in loads] == [0] * len(loads)
    assert statistics(split_fleet, "expired") == 0


def emulator(fleet: Fleet, instance_id: str, path: str, order: dict[str, Any] | None = None) -> Any:
    url = fleet.instances()[instance_id]["url"] + path
    data = None if order is None else json.dumps(order).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=5) as answer:
        return json.loads(answer.read())


def statistics(fleet: Fleet, name: str) -> int:
    ready = [each["id"] for each in fleet.instances().values() if each["state"] == "ready"]
    return sum(emulator(fleet, instance_id, "/emulator/statistics")[name] for instance_id in ready)


def prompt(number: int, words: int = 400) -> str:
    return f"{number:05d} " + "some words of a prompt " * (words // 4)


class Answer:
    def __init__(self, response: http.client.HTTPResponse, body: bytes) -> None:
        self.status, self.headers, self.body = response.status, response.headers, body

    @property
    def text(self) -> str:
        return str(json.loads(self.body)["choices"][0]["text"])

    @property
    def streamed(self) -> str:
        events = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", []))


def ask(fleet: Fleet, body: dict[str, Any], path: str = "/v1/completions", timeout_s: float = 20) -> Answer:
    at = urlsplit(fleet.endpoint)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=timeout_s)
    try:
        connection.request(
            "POST", path, json.dumps({"model": fleet.model, **body}), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        return Answer(response, response.read())
    finally:
        connection.close()


def metric(fleet: Fleet, name: str) -> float:
    with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@pytest.mark.parametrize("stream", [False, True])
def test_two_instances_serve_a_request_as_one_does(split_fleet: Fleet, stream: bool) -> None:
    body = {"prompt": prompt(1), "max_tokens": 12, "seed": 1}

    split = ask(split_fleet, {**body, "stream": stream})
    whole = ask(split_fleet, {**body, "kv_transfer_params": {"do_remote_prefill": False}})

    assert split.status == whole.status == 200
    assert (split.streamed if stream else split.text) == whole.text
    assert split.headers["x-dualmap-instance"] in DECODE
    assert split.headers["x-dualmap-prefill-instance"] in PREFILL
    assert whole.headers["x-dualmap-prefill-instance"] is None


def test_chats_are_split_too(split_fleet: Fleet) -> None:
    body = {"messages": [{"role": "user", "content": prompt(2)}], "max_completion_tokens": 8, "stream": True}

    answer = ask(split_fleet, {**body, "stream_options": {"include_usage": True}}, "/v1/chat/completions")

    assert answer.headers["x-dualmap-prefill-instance"] in PREFILL
    assert b'"completion_tokens":8' in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("change", [{"temperature": -1}, {"max_tokens": 5, "min_tokens": 9}])
def test_what_an_engine_refuses_reaches_the_client(split_fleet: Fleet, change: dict[str, Any]) -> None:
    answer = ask(split_fleet, {"prompt": prompt(4), "max_tokens": 4, **change})

    assert answer.status == 400
    assert json.loads(answer.body)["error"]["type"] == "BadRequestError"


def test_a_prefill_that_fails_is_tried_on_the_other_instance_and_then_whole(split_fleet: Fleet) -> None:
    for instance_id in PREFILL:
        emulator(split_fleet, instance_id, "/emulator/fail", {"count": 1, "status": 503})

    answer = ask(split_fleet, {"prompt": prompt(5), "max_tokens": 4})

    assert answer.status == 200
    assert answer.headers["x-dualmap-instance"] in DECODE
    assert answer.headers["x-dualmap-prefill-instance"] is None
    assert answer.headers["x-dualmap-attempts"] == "3"
