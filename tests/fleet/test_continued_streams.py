"""Streams whose instances die in the middle, over real processes: each goes on elsewhere, as if nothing had been."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

CHAT, COMPLETION, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSE = "/v1/responses"
OPTIONS = ("--instances", "3", "--replicas", "1", "--workers", "1", "--time-scale", "4")
PROMPT = "words of a prompt that is long enough to have some blocks " * 60
ENDS = {
    CHAT: "data: [DONE]",
    COMPLETION: "data: [DONE]",
    MESSAGE: "event: message_stop",
    RESPONSE: "event: response.completed",
}


@pytest.fixture(scope="module")
def streaming_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("continued"), (*QUICK, *OPTIONS)) as fleet:
        yield fleet


@dataclass
class Stream:
    """One streamed answer, as its client sees it."""

    path: str
    headers: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith("data: {")]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", [])]

    @property
    def text(self) -> str:
        if self.path == MESSAGE:
            return "".join(event["delta"].get("text", "") for event in self.events if "delta" in event)
        if self.path == RESPONSE:
            return "".join(event["delta"] for event in self.events if "delta" in event)
        if self.path == COMPLETION:
            return "".join(choice["text"] for choice in self.choices)
        return "".join(choice["delta"].get("content") or "" for choice in self.choices)

    @property
    def usage(self) -> dict[str, Any]:
        return {name: count for name, count in self.events[-1]["usage"].items() if not name.endswith("details")}


def ask(fleet: Fleet, stream: Stream, number: int, **more: Any) -> Stream:
    """Read a stream to its end."""
    at = urlsplit(fleet.endpoint)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    text = f"{number:05d} {PROMPT}"
    body: dict[str, Any] = {"model": fleet.model, "stream": True, "temperature": 0, **more}
    prompts = {COMPLETION: {"prompt": text}, RESPONSE: {"input": text}}
    body |= prompts.get(stream.path, {"messages": [{"role": "user", "content": text}]})
    try:
        connection.request("POST", stream.path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        stream.headers = dict(response.headers.items())
        while line := response.readline():
            stream.lines.append(line.decode().rstrip("\n"))
    finally:
        connection.close()
    return stream


def ask_and_kill(fleet: Fleet, path: str, number: int, *, kills: int = 1, after: int = 10, **more: Any) -> Stream:
    """A stream whose instance is killed once so many lines have come, and again later."""
    stream = Stream(path)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(ask, fleet, stream, number, **more)
        for kill in range(1, kills + 1):
            until(lambda lines=kill * after: len(stream.lines) > lines, "the stream is under way")
            (at,) = [each["instance_id"] for each in fleet.live_requests()]
            fleet.emulator(at, "/emulator/die", {"abruptly": True, "revive_after_s": 1.0})
        return reading.result(60)


@pytest.fixture(autouse=True)
def all_are_back(streaming_fleet: Fleet) -> Iterator[None]:
    yield
    streaming_fleet.until_idle()
    until(
        lambda: all(each["state"] == "ready" for each in streaming_fleet.instances().values()),
        "all instances are ready again",
    )


@pytest.mark.parametrize(
    ("path", "kills", "tokens"),
    [(CHAT, 1, 150), (COMPLETION, 1, 150), (MESSAGE, 1, 150), (RESPONSE, 1, 150), (CHAT, 2, 900), (RESPONSE, 2, 900)],
)
def test_a_stream_outlives_its_instances(streaming_fleet: Fleet, path: str, kills: int, tokens: int) -> None:
    number, how = 10 * kills, {"max_output_tokens" if path == RESPONSE else "max_tokens": tokens}
    options = {} if path in (MESSAGE, RESPONSE) else {"stream_options": {"include_usage": True}}
    uncut = ask(streaming_fleet, Stream(path), number, **how, **options)

    # Engines that had answered for a while had survived the prompt: no number of their deaths is put down to it.
    after = (75 if kills == 1 else 650) * (3 if path == RESPONSE else 2) // 2  # lines, of two or three an event
    cut = ask_and_kill(streaming_fleet, path, number, kills=kills, after=after, **how, **options)

    assert cut.text == uncut.text
    assert ENDS[path] in cut.lines
    explained = streaming_fleet.get(f"/admin/explain/{cut.headers['x-request-id']}")
    assert len(explained["continued"]) == kills
    assert explained["continued"][0][0] != explained["instance_id"] or kills > 1
    assert (explained["outcome"], explained["output_tokens"]) == ("completed", tokens)
    if path == RESPONSE:
        assert_same_response(cut.events, uncut.events)
        return
    if path == MESSAGE:
        kinds = [event["type"] for event in cut.events if event["type"] != "content_block_delta"]
        assert kinds == [event["type"] for event in uncut.events if event["type"] != "content_block_delta"]
        return
    assert cut.usage == uncut.usage
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in cut.events}) == 1
    assert sum("role" in choice.get("delta", {}) for choice in cut.choices) == (path == CHAT)
    assert [choice["finish_reason"] for choice in cut.choices if choice["finish_reason"]] == ["length"]
    assert not any(choice.get("token_ids") or choice.get("prompt_token_ids") for choice in cut.choices)


def assert_same_response(cut: list[dict[str, Any]], uncut: list[dict[str, Any]]) -> None:
    """The same events, numbered without a gap, and the same end, but for ids and what was cached."""
    delta = "response.output_text.delta"
    kinds = [[event["type"] for event in events if event["type"] != delta] for events in (cut, uncut)]
    assert kinds[0] == kinds[1]
    assert [event["sequence_number"] for event in cut] == list(range(len(cut)))
    assert len({event["item_id"] for event in cut if "item_id" in event}) == 1
    assert {event["output_index"] for event in cut if "output_index" in event} == {0}
    ends = [{**events[-1]["response"], "id": "", "created_at": 0} for events in (cut, uncut)]
    assert cut[-1]["response"]["id"] == cut[0]["response"]["id"]
    assert cut[-1]["response"]["created_at"] == cut[0]["response"]["created_at"]
    assert ends[0]["output"][0]["id"] == next(event["item_id"] for event in cut if "item_id" in event)
    for end in ends:
        end["output"] = [{**item, "id": ""} for item in end["output"]]
        end["usage"] = {**end["usage"], "input_tokens_details": None}
    assert ends[0] == ends[1]


def test_a_drain_within_a_time_moves_long_streams_and_other_answers(streaming_fleet: Fleet) -> None:
    fleet, how = streaming_fleet, {"max_tokens": 2000}
    uncut = ask(fleet, Stream(COMPLETION), 50, **how)
    cut = Stream(COMPLETION)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(ask, fleet, cut, 50, **how)
        until(lambda: len(cut.lines) > 30, "the stream is under way")
        (at,) = [each["instance_id"] for each in fleet.live_requests()]

        fleet.dualmap("instances", "drain", at, "--within", "0.5s", "--url", fleet.endpoint)

        until(lambda: fleet.instances()[at]["state"] == "standby", "the drain is over")
        assert not reading.done(), "it did not wait for the answer"
        reading.result(60)
    assert cut.text == uncut.text
    explained = fleet.get(f"/admin/explain/{cut.headers['x-request-id']}")
    assert [name for name, *_ in explained["continued"]] == [at]
    assert "drained" in explained["failures"][0]
    fleet.dualmap("instances", "resume", at, "--url", fleet.endpoint)
