"""Live replays against an emulated server: every request is accounted for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineRequest, EventKind
from dualmap.simulation.replay.replay import ReplayError, ReplayOptions, ReplayProgress, replay
from dualmap.simulation.replay.replay_bodies import Endpoint
from dualmap.simulation.replay.replay_report import summarize_replay
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.prompts import PromptWriter
from dualmap.simulation.workload.tokenizer import block_hashes
from dualmap.simulation.workload.traces import Trace, TraceRequest

SCALE = 20.0
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


def make_trace(count: int, gap_s: float = 0.5) -> Trace:
    """Prompts of 1,000 tokens, the first 512 of which all share."""
    return Trace(
        "made",
        512,
        tuple(TraceRequest(7.0 + index * gap_s, 1000, 5 + index, (0, 100 + index)) for index in range(count)),
    )


def options_for(emulator: EmulatedInstance, **changes: Any) -> ReplayOptions:
    return replace(ReplayOptions(url=emulator.url, time_scale=SCALE, sample_interval_s=0.05), **changes)


@pytest.mark.parametrize("endpoint", list(Endpoint))
async def test_every_request_is_answered_with_the_trace_s_lengths_and_hits(
    emulator: EmulatedInstance, endpoint: Endpoint
) -> None:
    # when a trace is replayed
    progress: list[ReplayProgress] = []
    record = await replay(make_trace(8), options_for(emulator, endpoint=endpoint), on_progress=progress.append)
    # then all is as the trace has it
    report = summarize_replay(record)
    assert (report.sent, report.answered, report.failed, report.unsent) == (8, 8, 0, 0)
    assert [request.index for request in record.requests] == list(range(8))
    assert [request.prompt_tokens for request in record.requests] == [1000] * 8
    assert [request.completion_tokens for request in record.requests] == [5 + index for index in range(8)]
    # all but the one that comes first, on a busy machine not always the first, find the shared block
    assert sorted(request.cached_tokens or 0 for request in record.requests) == [0] + [512] * 7
    assert report.hit_rate == pytest.approx(7 * 512 / 8000)
    assert all(request.ttft_s is not None and request.ttft_s > 0.05 for request in record.requests)
    assert [request.arrival_s for request in record.requests] == pytest.approx([index * 0.5 for index in range(8)])
    assert (progress[-1].sent, progress[-1].answered, progress[-1].in_flight) == (8, 8, 0)


async def test_requests_are_sent_at_their_times_whether_answers_come_or_not(
    emulator: EmulatedInstance, eventually: Eventually
) -> None:
    emulator.generator.pause()
    stop = asyncio.Event()
    running = asyncio.create_task(replay(make_trace(6), options_for(emulator), stop=stop))
    await eventually(lambda: emulator.generator.active == 6)
    stop.set()
    record = await running
    # what was in flight when it was stopped counts as failed
    assert len(record.requests) == 6
    assert {request.failure for request in record.requests} == {"given up: the replay was stopped"}


async def test_clients_ask_again_when_their_answer_came(emulator: EmulatedInstance) -> None:
    # given requests that are all due at once
    trace = make_trace(9, gap_s=0.0)
    # when three clients send them
    record = await replay(trace, options_for(emulator, loop=Loop(concurrency=3)))
    # then no more than three are ever under way, and each begins when an answer has ended
    ends_s = [one.arrival_s + (one.e2e_s or 0.0) for one in record.requests]
    assert [one.failure for one in record.requests] == [None] * 9
    for one in record.requests[3:]:
        assert any(one.arrival_s == pytest.approx(end_s, abs=0.2) for end_s in ends_s)
        before = [other for other in record.requests if other.index < one.index]
        assert sum(other.arrival_s + (other.e2e_s or 0.0) > one.arrival_s + 0.2 for other in before) < 3
    report = summarize_replay(record)
    assert (report.concurrency, report.sent, report.unsent) == (3, 9, 0)
    assert report.rate_per_s == pytest.approx(9 / (record.requests[-1].arrival_s - record.requests[0].arrival_s))


async def test_a_turn_is_sent_its_think_time_after_the_answer_before_it(emulator: EmulatedInstance) -> None:
    first, second, third = make_trace(3).requests
    trace = Trace(
        "made", 512, (replace(first, session="a"), replace(second, session="a", think_s=4.0), third)
    )  # fmt: skip

    record = await replay(trace, options_for(emulator))

    asked, other, answered = record.requests
    assert (other.arrival_s, other.completion_tokens) == (pytest.approx(1.0), 7)
    assert answered.completion_tokens == 6
    assert answered.arrival_s == pytest.approx(asked.arrival_s + (asked.e2e_s or 0.0) + 4.0, abs=0.2)


async def test_a_replay_ends_sending_in_time(emulator: EmulatedInstance) -> None:
    record = await replay(make_trace(40, gap_s=1.0), options_for(emulator, loop=Loop(seconds=3.5), skip_s=1.5))

    assert [one.arrival_s for one in record.requests] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    report = summarize_replay(record)
    assert (report.sent, report.unsent, report.skipped) == (4, 0, 2)


async def test_a_stopped_replay_accounts_for_what_it_did_not_send(emulator: EmulatedInstance) -> None:
    stop = asyncio.Event()

    def stop_after_two(progress: ReplayProgress) -> None:
        if progress.answered == 2:
            stop.set()

    record = await replay(make_trace(40, gap_s=2.0), options_for(emulator), on_progress=stop_after_two, stop=stop)
    report = summarize_replay(record)
    assert report.answered >= 2
    assert report.unsent > 0
    assert report.sent + report.unsent == 40
    assert report.answered + report.failed == report.sent == len(record.requests)


async def test_failures_are_counted_by_what_they_were(emulator: EmulatedInstance) -> None:
    # given a server that refuses two requests and then dies under the rest
    emulator.endpoints.faults.order_failures(2, 503)
    died = False

    def die_after_four(progress: ReplayProgress) -> None:
        nonlocal died
        if progress.answered == 2 and not died:
            died = True
            emulator.die(False, None)

    # when a trace is replayed
    record = await replay(make_trace(12), options_for(emulator), on_progress=die_after_four)
    # then nothing is missing
    report = summarize_replay(record)
    assert report.sent == 12
    assert report.answered >= 2
    assert report.answered + report.failed == 12
    assert report.failures["status 503"] == 2
    assert sum(report.failures.values()) == report.failed
    assert report.effective_capacity <= report.answered / 12


async def test_a_request_that_takes_too_long_is_given_up_and_freed(
    emulator: EmulatedInstance, eventually: Eventually
) -> None:
    emulator.generator.pause()
    record = await replay(make_trace(2), options_for(emulator, timeout_s=2.0))
    assert [request.failure for request in record.requests] == ["timeout", "timeout"]
    await eventually(lambda: emulator.generator.active == 0)


async def test_a_replay_against_nothing_is_an_error(emulator: EmulatedInstance) -> None:
    with pytest.raises(ReplayError, match="cannot connect"):
        await replay(make_trace(1), ReplayOptions(url="http://127.0.0.1:1"))
    with pytest.raises(ReplayError, match="names no model"):
        await replay(make_trace(1), options_for(emulator, url=f"{emulator.url}/elsewhere"))


@pytest.mark.parametrize(("key", "says"), [(None, "asks for an API key"), ("wrong", "asks for another API key")])
async def test_an_endpoint_that_asks_for_a_key_is_an_error_that_says_so(key: str | None, says: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ReplayError, match=f"{says}: --api-key KEY"):
            await replay(make_trace(1), ReplayOptions(url=url, api_key=key))


async def test_the_emulator_does_what_the_engine_model_does(emulator: EmulatedInstance) -> None:
    """One request at a time, so that nothing depends on the machine: same hits, and times never before the model's."""
    trace = make_trace(6)
    writer = PromptWriter(trace.block_tokens)
    engine = Engine(emulator.generator.config)
    options = options_for(emulator, endpoint=Endpoint.COMPLETIONS)
    for request in trace.requests:
        # given the model's time and hit for a request
        start_s = engine.next_event_s() or 1000.0 * (request.output_tokens)
        hashes = block_hashes(writer.text(request).encode(), 128)
        engine.submit(EngineRequest("one", request.input_tokens, request.output_tokens, hashes), start_s)
        modelled = next(event for event in engine.advance(start_s + 999) if event.kind is EventKind.FIRST_TOKEN)
        # when the emulator is asked the same
        record = await replay(Trace("one", 512, (request,)), options)
        # then it has the same hit, and its first token comes when the model says, or later by what the loop adds
        assert record.requests[0].cached_tokens == modelled.tokens
        assert record.requests[0].ttft_s is not None
        assert record.requests[0].ttft_s >= (modelled.time_s - start_s) * 0.98


ANSWER = (
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)


@asynccontextmanager
async def answering(field: str = "", heads: list[str] | None = None) -> AsyncIterator[str]:
    """The URL of a server that answers at once, with this header field, and notes the heads of requests."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if heads is not None and asked.startswith(b"POST"):
            heads.append(asked.decode())
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{field}content-length: {len(ANSWER)}\r\n\r\n"
        writer.write(head.encode() + ANSWER)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("field", "expected_s"),
    [
        ("x-dualmap-expected-ttft-ms: 50.5\r\n", 0.0505 * SCALE),
        ("x-dualmap-expected-ttft-ms: soon\r\n", None),
        ("", None),
    ],
)
async def test_the_routers_estimate_is_read_in_engine_seconds(field: str, expected_s: float | None) -> None:
    async with answering(field) as url:
        record = await replay(make_trace(1), ReplayOptions(url=url, model="m", time_scale=SCALE))

    assert record.requests[0].failure is None
    assert record.requests[0].expected_ttft_s == (None if expected_s is None else pytest.approx(expected_s))


async def test_times_count_from_when_a_request_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is behind hides nothing: every look at its clock takes it a second."""
    seconds = count()
    monkeypatch.setattr(
        "dualmap.simulation.replay.replay.time", SimpleNamespace(monotonic=lambda: float(next(seconds)))
    )

    async with answering() as url:
        record = await replay(make_trace(1), ReplayOptions(url=url, model="m"))

    (request,) = record.requests
    assert request.lag_s > 0
    assert (request.ttft_s, request.e2e_s) == (request.lag_s + 1, request.lag_s + 2)


async def test_a_server_that_does_not_tell_what_it_had_cached_is_not_taken_to_have_had_nothing() -> None:
    async with answering() as url:
        record = await replay(make_trace(1), ReplayOptions(url=url, model="m"))

    assert summarize_replay(record).hit_rate is None


async def test_each_request_asks_for_its_own_slo_or_the_one_that_its_length_has() -> None:
    """In milliseconds of the clock; it is judged by the same."""
    own = TraceRequest(7.0, 1000, 5, (0, 1), slo_ttft_s=0.5)
    longer, longest = (TraceRequest(8.0, 3000, 5, tuple(range(6))), TraceRequest(9.0, 9000, 5, tuple(range(18))))
    trace = Trace("made", 512, (own, longer, longest))
    scheduling = SchedulingSettings(slo_ttft_s=4.0, slo_ttft_s_per_1k_tokens=2.0, slo_ttft_max_s=15.0)
    heads: list[str] = []

    async with answering(heads=heads) as url:
        record = await replay(trace, ReplayOptions(url=url, model="m", time_scale=SCALE, scheduling=scheduling))

    asked_ms = sorted(int(found) for head in heads for found in re.findall(r"x-slo-ttft-ms: (\d+)", head))
    assert asked_ms == [25, 500, 750]
    assert [request.slo_s for request in record.requests] == [0.5, 10.0, 15.0]
    assert summarize_replay(record).own_slos == 3


async def test_turns_name_their_session_and_the_run_that_it_is_of() -> None:
    alone = TraceRequest(7.0, 1000, 5, (0, 1))
    agent = TraceRequest(7.0, 1000, 5, (2, 3), session="agent")
    helper = TraceRequest(7.0, 1000, 5, (4, 5), session="helper", after=("agent",))
    heads: list[str] = []

    async with answering(heads=heads) as url:
        await replay(
            Trace("made", 512, (alone, agent, helper)), ReplayOptions(url=url, model="m", time_scale=SCALE, salt="7")
        )

    names = sorted(tuple(re.findall(r"x-(?:parent-)?session-id: (\w+)", head)) for head in heads if "POST" in head)
    assert names == [(), ("7agent",), ("7helper", "7agent")]
