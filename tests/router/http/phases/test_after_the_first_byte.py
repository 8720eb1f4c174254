"""Broken off: an instance that fails in an answer that has begun ends it, and the client is told."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from dualmap.router.answers.machine import MAX_HELD_BYTES
from dualmap.scheduling.request.outcome import FailureKind, Outcome, Usage
from tests.router.http import kit
from tests.router.http.kit import StartInstance, StartRouter, Talk
from tests.router.http.phases.answers import USAGE, StartFleet, whole_answer, whole_stream


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

    intake.pool.loss_notifier.check(down_view)
    resumed.set()

    assert b"[DONE]" in await client.chunk()
    await kit.eventually(lambda: intake.placed_request.finished)
    assert intake.placed_request.outcome is Outcome.COMPLETED and intake.placed_request.failures == []
    assert not intake.pool.loss_notifier._listeners


@pytest.fixture
def begun_stream(fleet: StartFleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stream whose client has its first event, and that says no more until told; short times."""
    monkeypatch.setattr("dualmap.router.answers.machine.SILENT_S", 0.2)

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

    error = await until_error_event(client, tick=lambda: intake.pool.loss_notifier.check(down_view))

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
    assert not answer.whole
    assert answer.body.count(b'{"choi') == 1, "half an event would hide the one that says why"
    assert b'"error"' in answer.body


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


async def test_an_abort_that_the_client_asked_for_is_seen_before_its_usage_however_the_end_is_cut(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit.PlacedRequest, "abort_requested", True)
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
    client.chat(stream=True, requests_usage=True)
    await client.head()
    for _ in range(3):  # each event is a read of its own
        await client.chunk()
        seen.set()
    assert await client.chunk() == b"data: [DONE]\n\n" and await client.chunk() == b""
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.finished == [(Outcome.CLIENT_GONE, Usage(prompt_tokens=9, cached_tokens=4))]


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
