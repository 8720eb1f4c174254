"""The instance that reads requests as vLLM's own server does reads odd ones as that does, too."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.served_instance import served_instance


def test_of_a_doubled_key_the_last_one_counts_and_any_unicode_encoding_is_read() -> None:
    with served_instance("m") as instance, httpx.Client(base_url=instance.url) as client:
        for body in (b'{"model":"a","model":"b"}', '{"model":"b"}'.encode("utf-16"), '{"model":"b"}'.encode("utf-32")):
            answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, instance.last.model) == (200, "b")


def test_a_path_is_decoded_before_it_is_routed() -> None:
    with served_instance("m") as instance, httpx.Client() as client:
        answer = client.post(f"{instance.url}/v1%2Fcompletions", json={"model": "m"})
        assert (answer.status_code, instance.last.path) == (200, "/v1/completions")
        assert client.post(f"{instance.url}//v1/completions", json={"model": "m"}).status_code == 404


def test_of_a_doubled_field_of_a_form_the_last_one_counts() -> None:
    with served_instance("m") as instance, httpx.Client(base_url=instance.url) as client:
        files: list[Any] = [("file", b"x"), ("model", (None, "a")), ("model", (None, "b"))]
        answer = client.post("/v1/audio/transcriptions", files=files)
        assert (answer.status_code, instance.last.model) == (200, "b")


@pytest.mark.parametrize("stream", [True, False])
def test_it_answers_with_as_many_tokens_as_were_requested(stream: bool) -> None:
    body = {"model": "m", "messages": [], "max_tokens": 5, "stream": stream, "stream_options": {"include_usage": True}}
    with served_instance("m") as instance, httpx.Client(base_url=instance.url) as client:
        text = client.post("/v1/chat/completions", json=body).text
    last = json.loads(text.split("data: ")[-2] if stream else text)
    assert last["usage"]["completion_tokens"] == 5
    assert text.count("word") == 5
