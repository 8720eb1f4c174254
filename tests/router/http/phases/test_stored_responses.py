"""Responses that an instance stores, and their ids."""

from __future__ import annotations

from urllib.parse import quote, unquote

import orjson
import pytest

from tests.router.http.kit import Talk
from tests.router.http.phases.answers import StartFleet, whole_answer


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
