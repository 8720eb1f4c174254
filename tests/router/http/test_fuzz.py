"""Bytes that make no sense: whatever comes from either side, nothing hangs, leaks or gets out of step."""

from __future__ import annotations

import random

import pytest

from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.request_reader import ClientRequest, RequestReader
from tests.router.http import kit
from tests.router.http.kit import StartInstance, StartRouter, Talk

REQUESTS = [
    b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\n\r\n" + b'{"a": "bc"}',
    b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;e=x\r\nabc\r\n0\r\n\r\n",
    b"GET /x?y=z HTTP/1.1\r\nHost: h\r\nConnection: keep-alive\r\n\r\n",
    b"POST /u HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 4\r\n\r\nbody",
    b"GET http://h/abs HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nab",
]
SPLICES = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b" ",
    b":",
    b"chunked",
    b"Content-Length: 3\r\n",
    b"HTTP/1.0",
    b"\xff",
    b"0\r\n\r\n",
]


def mutated(rng: random.Random, wire: bytes) -> bytes:
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(wire) + 1)
        end = start + rng.choice([0, 0, 1, 2, 5])
        wire = wire[:start] + rng.choice([*SPLICES, b"", rng.randbytes(2)]) + wire[end:]
    return wire


def read(wire: bytes, sizes: list[int]) -> tuple[list[tuple[str, str, bytes]], bool]:
    """What a reader makes of the wire, cut into pieces of these sizes and a rest."""
    reader = RequestReader(
        lambda request: 1 << 20, max_header_bytes=1 << 16, max_headers=100, bodies=BodyBudget(1 << 30)
    )
    got: list[ClientRequest] = []
    for size in [*sizes, len(wire)]:
        piece, wire = wire[:size], wire[size:]
        if piece and not reader.stopped:
            got += reader.feed(piece)
    return [(request.method, request.path, request.body) for request in got], reader.stopped


@pytest.mark.parametrize("seed", range(8))
def test_requests_are_the_same_wherever_the_bytes_are_cut(seed: int) -> None:
    """Two readers that disagree are how requests are smuggled; here they are two cuts of one reader."""
    rng = random.Random(seed)
    for _ in range(150):
        wire = mutated(rng, b"".join(rng.choices(REQUESTS, k=rng.randint(1, 3))))
        whole = read(wire, [])
        assert read(wire, [1] * len(wire)) == whole, wire
        assert read(wire, [rng.randint(1, 20) for _ in range(20)]) == whole, wire


ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n" + b'{"a":1}',
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'1e\r\ndata: {"choices":[{"text":1}\r\n4\r\n]}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n',
    b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 X\r\ncontent-length: 0\r\n\r\n",
]


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_an_instance_sends_every_request_ends_once(
    start_instance: StartInstance, start_router: StartRouter, seed: int
) -> None:
    rng = random.Random(seed)

    async def babble(talk: Talk) -> None:
        wire = mutated(rng, rng.choice(ANSWERS))
        cut = rng.randrange(len(wire) + 1)
        await talk.send(wire[:cut])
        await talk.send(wire[cut:])
        talk.writer.close()

    instances = [await start_instance(babble) for _ in range(2)]
    intake = kit.Intake([instance.url for instance in instances])
    router = await start_router(intake)
    for _ in range(60):
        client = await router.connect()
        client.chat(stream=True)
        try:
            answer = await client.answer()
        except (EOFError, ConnectionError):
            pass  # broken off, as the instance did
        else:
            assert 200 <= answer.status < 600
        client.close()
    await kit.eventually(lambda: not router.state.connections and not router.state.tasks)
    assert {len(placed.finished) for placed in intake.placed_requests} == {1}
    router.plane.upstreams.close()
    await kit.eventually(lambda: all(instance.open == 0 for instance in instances))


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_a_client_sends_nothing_of_it_stays(
    start_instance: StartInstance, start_router: StartRouter, seed: int
) -> None:
    rng = random.Random(seed)

    async def answer(talk: Talk) -> None:
        await talk.answer({"ok": 1})

    instance = await start_instance(answer)
    intake = kit.Intake([instance.url])
    router = await start_router(intake)
    for _ in range(60):
        client = await router.connect()
        client.send(mutated(rng, b"".join(rng.choices(REQUESTS, k=rng.randint(1, 4)))))
        if rng.random() < 0.5:
            client.writer.write_eof()
            assert (await client.reader.read()).count(b"HTTP/1.1 5") == 0
        client.close()
    await kit.eventually(lambda: not router.state.connections and not router.state.tasks)
    assert all(len(placed.finished) == 1 for placed in intake.placed_requests)
    client = await router.connect()
    client.chat()
    assert (await client.answer()).status == 200, "the router serves on"
