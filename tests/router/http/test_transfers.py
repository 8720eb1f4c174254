"""What becomes of KV whose client has left before a decoder had it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from dualmap.router.answers.machine import AnswerSpec, Use
from dualmap.router.http import transfers as module
from dualmap.router.http.answer_driver import AnswerDriver
from dualmap.router.http.body_edits import BodyPart
from dualmap.router.http.deadlines import DeadlineChecks
from dualmap.router.http.leg_bodies import transfer_params
from dualmap.router.http.transfers import Transfers, Try
from dualmap.router.http.upstream_pool import UpstreamPool
from tests.router.http import kit
from tests.router.http.kit import StartInstance, Talk

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
STAGED = {"choices": [], "kv_transfer_params": {"remote_block_ids": [1, 2]}}


@pytest.fixture
async def upstreams() -> AsyncIterator[UpstreamPool]:
    pool = UpstreamPool(DeadlineChecks(0.02), connect_timeout_s=2.0, idle_s=60.0, max_idle=2)
    yield pool
    pool.close()


@pytest.fixture
async def transfers(upstreams: UpstreamPool) -> AsyncIterator[Transfers]:
    made = Transfers(upstreams)
    yield made
    made.close()


async def begin(upstreams: UpstreamPool, url: str, use: Use = Use.PREFILL) -> AnswerDriver:
    """A leg that was sent."""
    connection = await upstreams.connect(url)
    leg = AnswerDriver(connection, AnswerSpec("/v1/completions", use))
    connection.start([REQUEST])
    connection.answer_to(leg)
    return leg


class Decoders:
    """Where the KV of a late answer may go."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.told: list[bytes] = []

    def staged(self, body: bytes) -> Any:
        self.told.append(body)
        try:
            return None if transfer_params(body) is None else self.tries
        except ValueError:
            return None

    def tries(self) -> list[Try]:
        return [(self.url, self.parts)]

    def parts(self) -> list[BodyPart]:
        return [REQUEST]


async def test_what_a_prefill_stages_after_its_client_left_is_taken_over(
    transfers: Transfers, upstreams: UpstreamPool, start_instance: StartInstance
) -> None:
    answer = asyncio.Event()

    async def prefill(talk: Talk) -> None:
        await answer.wait()
        await talk.answer(STAGED)

    prefiller, decoder = await start_instance(prefill), await start_instance(lambda talk: talk.answer())
    leg = await begin(upstreams, prefiller.url)
    decoders = Decoders(decoder.url)

    transfers.free_late(leg, decoders.staged)
    answer.set()

    await kit.eventually(lambda: len(transfers) == 0)
    assert [orjson.loads(body) for body in decoders.told] == [STAGED]
    assert len(decoder.talks) == 1


async def test_an_answer_that_had_begun_is_read_on(
    transfers: Transfers, upstreams: UpstreamPool, start_instance: StartInstance
) -> None:
    body, rest = orjson.dumps(STAGED), asyncio.Event()

    async def prefill(talk: Talk) -> None:
        await talk.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body[:9]))
        await rest.wait()
        await talk.send(body[9:])

    prefiller, decoder = await start_instance(prefill), await start_instance(lambda talk: talk.answer())
    leg = await begin(upstreams, prefiller.url)
    decoders = Decoders(decoder.url)
    await kit.eventually(lambda: leg.machine.held_body == body[:9])

    transfers.free_late(leg, decoders.staged)
    rest.set()

    await kit.eventually(lambda: len(transfers) == 0)
    assert decoders.told == [body]


async def test_a_prefill_that_takes_long_is_told_to_stop(
    transfers: Transfers, upstreams: UpstreamPool, start_instance: StartInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREFILL_WITHIN_S", 0.05)
    stopped = asyncio.Event()

    async def prefill(talk: Talk) -> None:
        await talk.until_closed()
        stopped.set()

    prefiller, decoder = await start_instance(prefill), await start_instance(lambda talk: talk.answer())
    leg = await begin(upstreams, prefiller.url)
    decoders = Decoders(decoder.url)

    transfers.free_late(leg, decoders.staged)

    await asyncio.wait_for(stopped.wait(), 60)
    await kit.eventually(lambda: len(transfers) == 0)
    assert (decoders.told, decoder.talks, leg.connection.closed) == ([b""], [], True)


async def test_what_was_staged_just_before_the_instance_was_told_to_stop_is_taken_over(
    transfers: Transfers, upstreams: UpstreamPool, start_instance: StartInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREFILL_WITHIN_S", 0.2)

    async def prefill(talk: Talk) -> None:
        await talk.until_closed()
        await talk.answer(STAGED)

    prefiller, decoder = await start_instance(prefill), await start_instance(lambda talk: talk.answer())
    leg = await begin(upstreams, prefiller.url)

    transfers.free_late(leg, Decoders(decoder.url).staged)

    await kit.eventually(lambda: len(decoder.talks) == 1)


async def test_more_than_the_limit_are_closed_at_once(
    transfers: Transfers, upstreams: UpstreamPool, start_instance: StartInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 0)
    prefiller = await start_instance(lambda talk: talk.until_closed())
    leg = await begin(upstreams, prefiller.url)

    transfers.free_late(leg, Decoders("").staged)

    await kit.eventually(lambda: leg.connection.closed)


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 500)])
async def test_a_decode_leg_that_answers_with_an_error_has_taken_nothing_over(
    transfers: Transfers, upstreams: UpstreamPool, start_instance: StartInstance, stream: bool, status: int
) -> None:
    error = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}

    async def decode(talk: Talk) -> None:
        if stream:
            await talk.begin_stream()
            await talk.event(error)
            await talk.end_stream()
        else:
            await talk.answer(error, status=status)

    failing, decoder = await start_instance(decode), await start_instance(lambda talk: talk.answer())
    leg = await begin(upstreams, failing.url, Use.DECODED)

    transfers.wait_out(leg, Decoders(decoder.url).tries)

    await kit.eventually(lambda: len(decoder.talks) == 1)


async def test_a_decode_leg_without_a_client_is_closed_at_its_first_token(
    transfers: Transfers, upstreams: UpstreamPool, start_instance: StartInstance
) -> None:
    closed = asyncio.Event()

    async def decode(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.until_closed()
        closed.set()

    decoder, other = await start_instance(decode), await start_instance(lambda talk: talk.answer())
    leg = await begin(upstreams, decoder.url, Use.DECODED)

    transfers.wait_out(leg, Decoders(other.url).tries)

    await asyncio.wait_for(closed.wait(), 60)
    await kit.eventually(lambda: len(transfers) == 0)
    assert other.talks == []
