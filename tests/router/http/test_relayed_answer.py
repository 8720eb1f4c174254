"""Answers that pass the native relay: the same for the client, the request and the instance as without it."""

from __future__ import annotations

import asyncio
import random
import select
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
import pytest

from dualmap.router.answers.machine import ConnectionFailed
from dualmap.router.errors import ShuttingDownError
from dualmap.router.http.answer_driver import AnswerDriver
from dualmap.router.relay.relay import NATIVE
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from tests.router.http import kit
from tests.router.http.kit import Client, Instance, Router, StartInstance, StartRouter, Talk

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native relay is not built")

CHAT, COMPLETION, MESSAGE, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
WORDS = [f" word{n}" for n in range(40)]
Piece = tuple[bytes, bool]
"""Bytes that the instance sends, and whether it then waits until they were read."""


def event(value: Any, end: bytes = b"\n\n") -> bytes:
    return b"data: " + orjson.dumps(value) + end


def choice(path: str, text: str, ids: list[int] | None, finish: str | None = None) -> dict[str, Any]:
    content = {"delta": {"content": text}} if path == CHAT else {"text": text}
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish, "token_ids": ids}


def chunk_of(path: str, choices: list[Any], **more: Any) -> dict[str, Any]:
    return {"id": "id-1", "object": "o", "created": 1, "model": "m", "choices": choices, **more}


def events(path: str, asked: dict[str, Any], tokens: Sequence[int], *, ends: bool) -> list[bytes]:
    """The events that vLLM would send for the tokens of these places in WORDS."""
    if path == MESSAGE:
        return messages(tokens, ends=ends)
    if path == RESPONSE:
        told = [{"type": "response.output_text.delta", "delta": WORDS[token]} for token in tokens]
        told += [{"type": "response.completed"}] if ends else []
        return [b"event: %b\n" % each["type"].encode() + event(each) for each in told]
    wants_ids = asked.get("return_token_ids")
    made = []
    if path == CHAT and tokens[0] == 0:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        made.append(event(chunk_of(path, [role], prompt_token_ids=[1, 2, 3] if wants_ids else None)))
    for token in tokens:
        finish = "length" if ends and token == tokens[-1] else None
        said = choice(path, WORDS[token], [token] if wants_ids else None, finish)
        if path == COMPLETION:
            said["prompt_token_ids"] = [1, 2, 3] if wants_ids and token == tokens[0] else None
        made.append(event(chunk_of(path, [said])))
    if not ends:
        return made
    if asked.get("stream_options"):
        usage = {"prompt_tokens": 3 + tokens[0], "completion_tokens": len(tokens)}
        made.append(event(chunk_of(path, [], usage=usage, system_fingerprint="f")))
    return [*made, b"data: [DONE]\n\n"]


def messages(tokens: Sequence[int], *, ends: bool) -> list[bytes]:
    made: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "msg", "type": "message", "usage": {"input_tokens": 3}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    for token in tokens:
        delta = {"type": "text_delta", "text": WORDS[token]}
        made.append({"type": "content_block_delta", "index": 0, "delta": delta})
    if ends:
        made += [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": len(tokens)}},
            {"type": "message_stop"},
        ]
    return [b"event: %b\n" % each["type"].encode() + event(each) for each in made]


def as_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def send(talk: Talk, pieces: Sequence[Piece]) -> None:
    for data, waits in pieces:
        await talk.send(data)
        if waits:
            await asyncio.sleep(0.002)


class Scripted:
    """An instance whose first answer is of ``pieces``, which a test makes of what it is asked; then it does ``then``.
    Every other answer is whole."""

    def __init__(self, pieces: Callable[[str, dict[str, Any]], list[Piece]], then: Any = None) -> None:
        self.pieces, self.then, self.asked = pieces, then, 0

    async def __call__(self, talk: Talk) -> None:
        path, asked = talk.head.split(b" ")[1].decode(), orjson.loads(talk.body)
        if path == "/tokenize" and "messages" in asked:
            return await talk.answer({})
        if path == "/tokenize":
            return await talk.answer({"count": len(asked["prompt"].split()), "max_model_len": 4096})
        self.asked += 1
        if not asked.get("stream"):
            return await talk.answer({"object": "chat.completion", "choices": [choice(path, "a", None, "stop")]})
        await talk.begin_stream()
        if self.asked > 1:
            return await send(
                talk, [(as_chunk(each), True) for each in self.rest(path, asked)] + [(b"0\r\n\r\n", False)]
            )
        await send(talk, self.pieces(path, asked))
        if self.then is not None:
            await self.then(talk)
        return None

    def rest(self, path: str, asked: dict[str, Any]) -> list[bytes]:
        said = 0
        if isinstance(asked.get("prompt"), list):
            said = len(asked["prompt"]) - 3
        elif path == CHAT and asked["messages"][-1]["role"] == "assistant":
            said = len(asked["messages"][-1]["content"].split())
        return events(path, asked, range(said, len(WORDS)), ends=True)


class Seen:
    """The end of one request, and the state of the connections behind it."""

    def __init__(self, answer: kit.Answer, intake: kit.Intake, instances: list[Instance], later: Any) -> None:
        placed = intake.placed_requests[0]
        self.answer = answer.status, answer.whole, answer.body
        self.fields = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
        self.finished = placed.finished
        self.failures = [failure.kind for failure in placed.failures]
        self.faults = [failure.kind for failure in placed.faults]
        self.sent_tokens, self.first_tokens, self.tries = placed.sent_tokens, placed.first_tokens, placed.machine.tries
        self.later = later
        self.connections = [instance.connections for instance in instances]


def ask(client: Client, path: str, **more: Any) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if path in (COMPLETION, RESPONSE):
        prompt = {"prompt" if path == COMPLETION else "input": "hi|", "max_tokens": 100}
    client.request(path, {"model": "m", "stream": True, **prompt, **more})


class BothPaths:
    """The same request and the same instances, with the relay and without it."""

    def __init__(self, start_instance: StartInstance, start_router: StartRouter) -> None:
        self.start_instance, self.start_router = start_instance, start_router
        self.relayed_chunks = 0

    async def see(
        self, pieces: Any, path: str, *, relay: bool, then: Any = None, settings: Any = None, **asked: Any
    ) -> Any:
        script = Scripted(pieces, then)
        instances = [await self.start_instance(script) for _ in range(2)]
        intake = kit.Intake([instance.url for instance in instances])
        router: Router = await self.start_router(
            intake, native_relay=relay, **({"continue_streams": "tokens"} | (settings or {}))
        )
        client = await router.connect()
        ask(client, path, **asked)
        answer = await client.answer()
        await kit.eventually(lambda: intake.placed_requests[0].finished)
        later = None
        if answer.whole and answer.headers.get("connection") != "close":
            ask(client, CHAT, stream=False)
            later = (await client.answer()).status
        assert router.plane.kept.held_bytes == 0
        if router.plane.relay is not None:
            assert router.plane.relay.streams == 0
            self.relayed_chunks += router.plane.relay.chunks
        return vars(Seen(answer, intake, instances, later))

    async def compare(self, pieces: Any, path: str, **how: Any) -> dict[str, Any]:
        without, with_it = [await self.see(pieces, path, relay=relay, **how) for relay in (False, True)]
        timed = {"connections": with_it["connections"]}  # a port that is checked is connected to
        assert with_it == without | timed
        return dict(with_it)


@pytest.fixture
def both(start_instance: StartInstance, start_router: StartRouter) -> BothPaths:
    return BothPaths(start_instance, start_router)


def whole(path: str, asked: dict[str, Any]) -> list[Piece]:
    made = [(as_chunk(each), True) for each in events(path, asked, range(len(WORDS)), ends=True)]
    return [*made, (b"0\r\n\r\n", True)]


def begun(path: str, asked: dict[str, Any]) -> list[Piece]:
    return [(as_chunk(each), True) for each in events(path, asked, range(20), ends=False)]


SHOWS_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "settings", "asked"),
    [
        *[(path, {}, asked) for path in (CHAT, COMPLETION) for asked in ({}, SHOWS_USAGE, {"return_token_ids": True})],
        *[(path, {"continue_streams": "off"}, asked) for path in (CHAT, RESPONSE) for asked in ({}, SHOWS_USAGE)],
        (CHAT, {"continue_streams": "text"}, {}),
        (CHAT, {"ask_usage": False}, {}),
        (MESSAGE, {}, {}),
        (RESPONSE, {}, {}),
    ],
)
async def test_a_stream_is_the_same_and_most_of_it_passes_the_relay(
    both: BothPaths, path: str, settings: dict[str, Any], asked: dict[str, Any]
) -> None:
    seen = await both.compare(whole, path, settings=settings, **asked)

    assert seen["answer"][:2] == (200, True) and seen["finished"][0][0] is Outcome.COMPLETED
    assert seen["later"] == 200 and seen["connections"] == [1, 0], "both connections are used again"
    assert both.relayed_chunks > len(WORDS) // 2


async def breaks(talk: Talk) -> None:
    talk.reset()


async def ends_early(talk: Talk) -> None:
    await talk.send(b"0\r\n\r\n")


async def breaks_in_a_chunk(talk: Talk) -> None:
    await talk.send(b'40\r\ndata: {"id":"')
    await asyncio.sleep(0.02)
    talk.reset()


async def tells_an_error(talk: Talk) -> None:
    error = event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
    await talk.send(as_chunk(error) + as_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def aborts(talk: Talk) -> None:
    aborted = event(chunk_of(CHAT, [choice(CHAT, "", None, "abort")]))
    await talk.send(as_chunk(aborted) + as_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def babbles(talk: Talk) -> None:
    await talk.send(b"5\r\nabcdefgh\r\n")
    await talk.until_closed()


async def ends_its_half(talk: Talk) -> None:
    talk.writer.write_eof()
    await talk.until_closed()


async def hangs(talk: Talk) -> None:
    await talk.until_closed()


FAILS = [breaks, ends_early, breaks_in_a_chunk, tells_an_error, aborts, babbles, ends_its_half]


@pytest.mark.parametrize("then", FAILS, ids=lambda fails: fails.__name__)
@pytest.mark.parametrize(
    ("path", "continued"),
    [(CHAT, "tokens"), (CHAT, "text"), (CHAT, "off"), (COMPLETION, "tokens"), (MESSAGE, "tokens")],
)
async def test_a_stream_whose_instance_fails_ends_or_goes_on_as_without_the_relay(
    both: BothPaths, path: str, then: Any, continued: str
) -> None:
    seen = await both.compare(begun, path, then=then, settings={"continue_streams": continued})

    assert both.relayed_chunks > 10
    if continued != "off" and not (path == MESSAGE and then is aborts):
        assert seen["tries"] == 2 and seen["answer"][1]
    if continued == "tokens" and path != MESSAGE:
        said = [
            part
            for event in seen["answer"][2].split(b"\n\n")
            if event.startswith(b"data: {")
            for part in orjson.loads(event[6:])["choices"]
        ]
        text = "".join(part["text"] if path == COMPLETION else part["delta"].get("content", "") for part in said)
        assert text == "".join(WORDS)


@pytest.mark.parametrize("continued", ["tokens", "off"])
async def test_an_instance_that_hangs_is_seen_by_the_time_of_its_last_bytes(both: BothPaths, continued: str) -> None:
    settings = {"continue_streams": continued, "chunk_timeout_s": 0.5}
    seen = await both.compare(begun, CHAT, then=hangs, settings=settings)

    assert FailureKind.TIMEOUT in (*seen["failures"], *seen["faults"])


async def test_a_stream_that_flows_is_not_taken_for_one_that_hangs(both: BothPaths) -> None:
    def slow(path: str, asked: dict[str, Any]) -> list[Piece]:
        made: list[Piece] = []
        for each in events(path, asked, range(20), ends=True):
            made += [(as_chunk(each), True), *[(b"", True)] * 20]
        return [*made, (b"0\r\n\r\n", True)]

    seen = await both.see(slow, CHAT, relay=True, settings={"chunk_timeout_s": 0.4})

    assert seen["finished"][0][0] is Outcome.COMPLETED and not seen["failures"]


@pytest.mark.parametrize("seed", range(8))
async def test_however_a_stream_is_cut_and_mixed_with_what_the_relay_does_not_read_it_is_the_same(
    both: BothPaths, seed: int
) -> None:
    rng = random.Random(seed)
    path, total = rng.choice([CHAT, COMPLETION, MESSAGE]), rng.choice([5, 20, 40])
    continued, usage = rng.choice(["tokens", "tokens", "off"]), rng.random() < 0.3
    odd = [b": ping\n\n", b"retry: 3\n\n", b"\r\n\r\n", b'data: {"x":\ndata: 1}\n\n', b"data: x\r\n\r\n", b": half"]
    cut, odd_share, end = rng.choice([0, 7, 60, 400]), rng.choice([0, 0, 0.1, 0.4]), rng.random()
    form = rng.choice([b"%x\r\n%b\r\n", b"%x\r\n%b\r\n", b"00%X\r\n%b\r\n", b"%x;e=1\r\n%b\r\n"])
    plan = random.Random(seed)

    def mixed(path: str, asked: dict[str, Any]) -> list[Piece]:
        rng = plan
        rng.seed(seed)
        wire = b""
        for each in events(path, asked, range(total), ends=end < 0.7):
            if rng.random() < odd_share:
                each += rng.choice(odd)
            if rng.random() < 0.1 and len(each) > 9:
                wire += form % (9, each[:9])
                each = each[9:]
            wire += form % (len(each), each)
        if end < 0.7:
            wire += rng.choice([b"0\r\n\r\n", b"0\r\ntrailer: 1\r\n\r\n", b"000\r\n\r\n"])
        made: list[Piece] = []
        while wire:
            size = rng.randint(1, cut) if cut else wire.index(b"\r\n", wire.index(b"\r\n") + 2) + 2
            made.append((wire[:size], rng.random() < 0.3 if cut else True))
            wire = wire[size:]
        return made

    then = None if end < 0.7 else rng.choice([breaks, babbles, ends_its_half])
    more = {"stream_options": {"include_usage": True}} if usage else {}
    await both.compare(mixed, path, then=then, settings={"continue_streams": continued}, **more)


async def test_a_client_that_reads_slowly_gets_all_and_holds_its_instance_back(
    start_instance: StartInstance, start_router: StartRouter
) -> None:
    sent, total = 0, 8_000_000
    plain = as_chunk(event(chunk_of(CHAT, [choice(CHAT, "x" * 2000, [7])])))

    async def flood(talk: Talk) -> None:
        nonlocal sent
        talk.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
        await talk.begin_stream()
        await send(talk, [(as_chunk(each), True) for each in events(CHAT, {"return_token_ids": 1}, [0, 1], ends=False)])
        while sent < total:
            await talk.send(plain)
            sent += len(plain)
        await send(talk, [(as_chunk(each), True) for each in events(CHAT, {}, [39], ends=True)])
        await talk.send(b"0\r\n\r\n")

    instance = await start_instance(flood)
    intake = kit.Intake([instance.url])
    router = await start_router(intake, native_relay=True, continue_streams="tokens")
    client = await router.connect()
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    ask(client, CHAT)
    await kit.eventually(lambda: any(each._source and each._source.paused for each in router.state.connections))
    assert sent < total and router.plane.relay is not None and router.plane.relay.streams == 0
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    answer = await client.answer()

    assert answer.whole and answer.body.count(b"x" * 2000) == total // len(plain) + 1
    assert b"[7]" not in answer.body
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.COMPLETED)


Started = list[tuple[kit.Intake, Router]]
Begun = Callable[..., Awaitable[tuple[kit.Intake, Router, list[Instance], Client]]]


async def ends(talk: Talk) -> None:
    """Sends the rest of a chat, behind what ``begun`` has made of it."""
    left = events(CHAT, orjson.loads(talk.body), range(20, len(WORDS)), ends=True)
    await send(talk, [(as_chunk(each), True) for each in left] + [(b"0\r\n\r\n", True)])


@pytest.fixture
def started() -> Started:
    """The intakes and the routers that ``flowing`` has started."""
    return []


@pytest.fixture
def flowing(start_instance: StartInstance, start_router: StartRouter, started: Started) -> Begun:
    """A stream that the relay has, of an instance that then does ``then``."""

    async def start(then: Any = hangs, **settings: Any) -> Any:
        script = Scripted(begun, then)
        instances = [await start_instance(script) for _ in range(2)]
        intake = kit.Intake([instance.url for instance in instances])
        router = await start_router(intake, native_relay=True, **({"continue_streams": "tokens"} | settings))
        started.append((intake, router))
        client = await router.connect()
        ask(client, CHAT)
        await kit.eventually(lambda: router.plane.relay is not None and router.plane.relay.chunks > 15)
        return intake, router, instances, client

    return start


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_client_that_leaves_a_relayed_stream_frees_the_instance(flowing: Begun, leave: str) -> None:
    intake, router, instances, client = await flowing()
    getattr(client, leave)()

    await kit.eventually(lambda: intake.placed_request.finished == [(Outcome.CLIENT_GONE, None)])
    await kit.eventually(lambda: instances[0].open == 0 and router.plane.relay.streams == 0)


async def test_a_relayed_stream_that_is_cut_off_ends_in_an_error_event(flowing: Begun) -> None:
    intake, router, _, client = await flowing()
    (connection,) = router.state.connections
    assert router.plane.relay.streams == 1
    assert connection.cut_off(ShuttingDownError("the replica stops"))
    answer = await client.answer()

    assert not answer.whole and answer.body.endswith(b"\n\n") and b"the replica stops" in answer.body
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.CUT_OFF)
    assert router.plane.relay.streams == 0


async def test_a_relayed_stream_of_an_instance_that_leaves_goes_on_elsewhere(flowing: Begun) -> None:
    intake, _, instances, client = await flowing()
    (exchange,) = intake.pool.loss_notifier._listeners["i0"]
    exchange.instance_leaves("its time to drain is over")
    answer = await client.answer()

    assert answer.whole and answer.body.count(b"word") == len(WORDS)
    (sent,) = intake.placed_request.sent_tokens
    assert sent and 10 < sent <= 20 and instances[1].connections == 1


async def test_a_client_that_closes_its_half_gets_its_relayed_stream_whole(flowing: Begun) -> None:
    async def ends_later(talk: Talk) -> None:
        await asyncio.sleep(0.3)
        await ends(talk)

    intake, _, _, client = await flowing(ends_later)
    client.writer.write_eof()
    answer = await client.answer()

    assert answer.whole and answer.body.count(b"word") == len(WORDS)
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.COMPLETED)


async def test_requests_that_are_sent_ahead_of_a_relayed_answer_are_answered_in_turn(flowing: Begun) -> None:
    _, _, instances, client = await flowing(ends)
    ask(client, CHAT, stream=False)
    ask(client, CHAT)
    answers = [await client.answer() for _ in range(3)]

    assert [answer.status for answer in answers] == [200] * 3 and all(answer.whole for answer in answers)
    assert answers[0].body.count(b"word") == answers[2].body.count(b"word") == len(WORDS)
    assert instances[0].connections == 1


async def test_without_memory_a_relayed_stream_passes_and_is_not_kept(flowing: Begun) -> None:
    _, router, _, client = await flowing(ends, memory_bytes=0)
    answer = await client.answer()

    assert answer.whole and answer.body.count(b"word") == len(WORDS) and b'token_ids":[' not in answer.body
    assert router.plane.kept.lost == 1


def has_returned(router: Router, *, within_s: float = 10) -> bool:
    """Whether the thread returns a stream. The event loop waits meanwhile, and so has not collected it."""
    return bool(select.select([router.plane.relay._native.fileno()], [], [], within_s)[0])


async def lent(router: Router) -> None:
    """Wait until the relay has the stream, and nearly all of what the instance has sent has passed."""
    await kit.eventually(lambda: router.plane.relay.streams == 1 and router.plane.relay.chunks > 15)


async def test_a_stream_that_fails_as_its_log_is_full_goes_on_without_a_word_twice(
    flowing: Begun, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = random.Random(1)
    words = [f" word{n}-" + "".join(some.choices("abcdefghijklmnop", k=60)) for n in range(400)]
    monkeypatch.setattr(f"{__name__}.WORDS", words)
    returned = []

    async def fills(talk: Talk) -> None:
        ((intake, router),) = started
        await lent(router)
        for each in events(CHAT, orjson.loads(talk.body), range(20, 390), ends=False):
            talk.writer.write(as_chunk(each))
            if has_returned(router, within_s=0.005):
                returned.append(talk)
                break
        (driver,) = intake.pool.loss_notifier._listeners["i0"]
        assert isinstance(driver, AnswerDriver)
        driver._report(ConnectionFailed(InstanceFailure(FailureKind.DOWN, "it does not answer")))

    _, _, _, client = await flowing(fills)
    answer = await client.answer()

    assert returned and answer.whole
    assert [answer.body.count(b" word%d-" % n) for n in range(400)] == [1] * 400


async def test_an_answer_that_is_cut_off_does_not_go_on_whatever_its_instance_has_done(
    flowing: Begun, started: Started
) -> None:
    cut = []

    async def fails(talk: Talk) -> None:
        ((_, router),) = started
        await lent(router)
        talk.writer.write(as_chunk(event({"error": {"message": "EngineCore encountered an issue", "code": 500}})))
        assert has_returned(router)
        (connection,) = router.state.connections
        cut.append(connection.cut_off(ShuttingDownError("the replica stops")))

    intake, _, instances, client = await flowing(fails)
    answer = await client.answer()

    assert cut == [True] and not answer.whole and b"the replica stops" in answer.body
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.CUT_OFF)
    assert instances[1].connections == 0


async def test_nothing_follows_an_answer_that_ends_as_its_client_is_probed(flowing: Begun, started: Started) -> None:
    async def ends(talk: Talk) -> None:
        ((intake, router),) = started
        await lent(router)
        left = events(CHAT, orjson.loads(talk.body), range(20, len(WORDS)), ends=True)
        talk.writer.write(b"".join(map(as_chunk, left)) + b"0\r\n\r\n")
        assert has_returned(router)
        (driver,) = intake.pool.loss_notifier._listeners["i0"]
        assert isinstance(driver, AnswerDriver)
        driver.probe()

    _, _, _, client = await flowing(ends)
    answer = await client.answer()
    ask(client, CHAT, stream=False)

    assert answer.whole and answer.body.count(b"word") == len(WORDS)
    assert (await client.answer()).status == 200, "no byte is between the answers"


async def test_a_stream_of_which_returned_bytes_cannot_be_handled_goes_on_elsewhere(
    flowing: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_it_is = AnswerDriver.body_received
    failed: list[AnswerDriver] = []

    def fail_once(driver: AnswerDriver, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        if not failed and b" word25" in b"".join(pieces):
            failed.append(driver)
            raise MemoryError
        as_it_is(driver, wire, pieces, complete)

    monkeypatch.setattr(AnswerDriver, "body_received", fail_once)

    async def goes_on(talk: Talk) -> None:
        for each in events(CHAT, orjson.loads(talk.body), range(20, len(WORDS)), ends=False):
            odd = b" word25" in each  # a chunk that the relay gives back
            await talk.send(b"%x;a\r\n%b\r\n" % (len(each), each) if odd else as_chunk(each))
        await talk.until_closed()

    _, _, instances, client = await flowing(goes_on)
    answer = await client.answer()

    assert failed and answer.whole and answer.body.count(b"word") == len(WORDS)
    assert instances[1].connections == 1


async def test_nothing_passes_a_relay_that_is_turned_off(
    start_instance: StartInstance, start_router: StartRouter
) -> None:
    instance = await start_instance(Scripted(whole))
    router = await start_router(kit.Intake([instance.url]), native_relay=False)
    client = await router.connect()
    ask(client, CHAT)

    assert (await client.answer()).whole and router.plane.relay is None
