"""Streams that an instance aborts because their client has ended them by their ids."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.scheduling.request.outcome import FailureKind, Outcome
from tests.router.http.kit import CHAT, Intake, StartInstance, StartRouter, Talk, eventually


async def aborts(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.role()
    await talk.token("one ")
    await talk.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
    await talk.chunk(b"data: [DONE]\n\n")
    await talk.end_stream()


@pytest.mark.parametrize("how", ["off", "text", "tokens"])
async def test_they_end_as_their_instance_says_go_on_nowhere_and_blame_nobody(
    start_router: StartRouter, start_instance: StartInstance, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.router.http.kit.PlacedRequest.abort_requested", True)
    instance, other = await start_instance(aborts), await start_instance(aborts)
    intake = Intake([instance.url, other.url])
    client = await (await start_router(intake, continue_streams=how)).connect()

    client.chat(stream=True)

    answer = await client.answer()
    assert b'"finish_reason":"abort"' in answer.body.replace(b'": "', b'":"')
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in answer.body
    assert other.talks == []
    await eventually(lambda: intake.placed_request.outcome)
    assert intake.placed_request.outcome is Outcome.CLIENT_GONE
    assert intake.placed_request.failures == intake.placed_request.faults == []


async def test_one_that_its_client_has_not_ended_goes_on_elsewhere(
    start_router: StartRouter, start_instance: StartInstance
) -> None:
    instance, other = await start_instance(aborts), await start_instance(aborts)
    intake = Intake([instance.url, other.url])
    client = await (await start_router(intake, continue_streams="text")).connect()

    client.chat(stream=True)

    await client.answer()
    assert other.talks


@pytest.mark.parametrize(
    ("how", "fields"),
    [("text", {}), ("tokens", {}), ("off", {}), ("tokens", {"tool_choice": "required"})],
    ids=["text", "tokens", "off", "grammar"],
)
async def test_the_call_of_a_tool_that_is_aborted_ends_in_an_error_event_so_that_no_client_takes_it_for_whole(
    start_router: StartRouter, start_instance: StartInstance, how: str, fields: dict[str, Any]
) -> None:
    """Agents that complete the JSON of a call by themselves run it after any reason to finish."""

    async def aborts_in_a_call(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.role()
        function = {"name": "scale", "arguments": '{"replicas": 12'}
        call = {"index": 0, "id": "call-1", "type": "function", "function": function}
        await talk.event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})
        await talk.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
        await talk.chunk(b"data: [DONE]\n\n")
        await talk.end_stream()

    instance, other = await start_instance(aborts_in_a_call), await start_instance(aborts)
    intake = Intake([instance.url, other.url])
    client = await (await start_router(intake, continue_streams=how)).connect()

    client.request(CHAT, {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields})

    answer = await client.answer()
    assert b'{"replicas": 12' in answer.body.replace(b'\\"', b'"')
    assert b'"error"' in answer.body
    assert b'"abort"' not in answer.body
    assert other.talks == []
    await eventually(lambda: intake.placed_request.outcome)
    assert [each.kind for each in intake.placed_request.faults] == [FailureKind.ABORTED]


async def test_an_error_event_of_a_stream_that_goes_on_nowhere_reaches_the_client_as_it_came(
    start_router: StartRouter, start_instance: StartInstance
) -> None:
    async def fails(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.role()
        await talk.token("one ")
        await talk.event({"error": {"message": "CUDA is out of luck", "code": 500}})
        await talk.end_stream()

    intake = Intake([(await start_instance(fails)).url])
    client = await (await start_router(intake, continue_streams="off")).connect()

    client.chat(stream=True)

    answer = await client.answer()
    assert answer.body.count(b'"error"') == 1
    assert b"CUDA is out of luck" in answer.body
