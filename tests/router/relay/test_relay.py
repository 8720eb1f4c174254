"""The native relay beside the Python that it stands for: the same bytes for the client, and the same is kept."""

from __future__ import annotations

import array
import asyncio
import fcntl
import re
import socket
import termios
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import httptools
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.router.answers.failures import failure_in
from dualmap.router.answers.kept_stream import KeptBudget, KeptStream
from dualmap.router.answers.sse import event_object
from dualmap.router.answers.usage_remover import UsageRemover
from dualmap.router.http.reading import read_so_far
from dualmap.router.relay.event_log import unpack
from dualmap.router.relay.relay import EVENTS, HIDE_IDS, HIDE_USAGE, KEEP, MESSAGES, NATIVE, RESPONSES, Relay, Returned

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native relay is not built")

CHAT, MESSAGE, RESPONSE = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WITHIN_S = 20.0
MARK = b'finish_reason":null'


# streams -------------------------------------------------------------------------------------------------------
def event(value: Any, end: bytes = b"\n\n", **how: Any) -> bytes:
    return b"data: " + orjson.dumps(value, **how) + end


def token(text: str, ids: list[int] | None = None, *, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "choices": [choice], **more}


ROLE = event(token("", None, prompt_token_ids=[1, 2, 3]) | {"choices": [{"delta": {"role": "assistant"}}]})
texts = st.text(max_size=12) | st.sampled_from(
    ['"token_ids":[1]', '"error"', "]", '"usage"', "finish_reason", '"finish_reason":"stop"', "\n\n", "\r\n", "é" * 200]
)
ids = st.none() | st.lists(st.integers(0, 200_000), min_size=1, max_size=5)
plain = st.builds(lambda text, ids: event(token(text, ids)), texts, ids)
odd = st.one_of(
    st.builds(lambda text, ids: event(token(text, ids), b"\r\n\r\n"), texts, ids),
    st.builds(lambda text, ids: event(token(text, ids), b"\r\r"), texts, ids),
    st.builds(lambda text, ids: event(token(text, ids, finish="stop")), texts, ids),
    st.builds(
        lambda text, ids: event(token(text, ids, usage={"prompt_tokens": 3, "completion_tokens": 1})), texts, ids
    ),
    st.builds(lambda text, ids: event(token(text, ids, prompt_token_ids=[5])), texts, ids),
    st.builds(lambda text, ids: event(token(text, ids)).replace(b'":', b'": '), texts, ids),
    st.builds(lambda size, ids: event(token("x" * size, ids)), st.integers(1000, 50_000), ids),
    st.sampled_from(
        [
            b": ping\n\n",
            b":\n",
            b"data: [DONE]\n\n",
            b"\n",
            b"data: {\n\n",
            b'data: {"a":\ndata: 1}\n\n',
            b"retry: 3\n\n",
            event({"error": {"message": "no", "code": 500}}),
            event({"choices": [{"delta": {}, "finish_reason": "abort"}]}),
            event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}),
            event({"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "recomputed"}]}),
            b'data: {"choices":[{"finish_reason":null,"token_ids":[1,2}]}\n\n',
        ]
    ),
)
streams = st.lists(st.integers(0, 9).flatmap(lambda n: odd if n == 0 else plain), min_size=1, max_size=14)
delta = st.builds(
    lambda text: (
        b"event: content_block_delta\n"
        + event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})
    ),
    texts,
)
named = st.sampled_from(
    [
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null}}\n\n',
        b'event: ping\ndata: {"type":"ping"}\n\n',
        b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n',
        b'event: error\ndata: {"type":"error","error":{"message":"m"}}\n\n',
        b'event: content_block_delta\ndata: {"type":"error","error":{"message":"m"}}\n\n',
    ]
)
messages = st.lists(st.integers(0, 9).flatmap(lambda n: named if n == 0 else delta), min_size=1, max_size=14)
said = st.builds(
    lambda text: (
        b"event: response.output_text.delta\n"
        + event({"type": "response.output_text.delta", "delta": text, "logprobs": []})
    ),
    texts,
)
other = st.sampled_from(
    [
        b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.failed"}\n\n',
        b'event: response.output_text.delta\ndata: {"status":"cancelled"}\n\n',
        b'event: response.output_text.done\ndata: {"type":"response.output_text.done","text":"a"}\n\n',
    ]
)
responses = st.lists(st.integers(0, 9).flatmap(lambda n: other if n == 0 else said), min_size=1, max_size=14)


def as_chunks(stream: Sequence[bytes], groups: list[int], style: int) -> bytes:
    """Chunks of so many events each; a negative number ends one within an event."""
    wire, body, at = b"", b"".join(stream), 0
    ends = []
    for one in stream:
        at += len(one)
        ends.append(at)
    sizes, start, n = [], 0, 0
    while start < len(body):
        group = groups[n % len(groups)] if groups else 1
        later = [end for end in ends if end > start]
        stop = later[min(abs(group), len(later)) - 1]
        if group < 0 and stop - start > 3:
            stop -= 3
        sizes.append((start, stop))
        start, n = stop, n + 1
    form = [b"%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"0%x\r\n%b\r\n", b"%x;a=b\r\n%b\r\n"][style]
    for start, stop in sizes:
        wire += form % (stop - start, body[start:stop])
    return wire


# the two paths ---------------------------------------------------------------------------------------------------
class Pythons:
    """Does with the bytes of a stream that has begun what router.http does."""

    def __init__(self, path: str, *, hides_ids: bool, hides_usage: bool, keeps: bool) -> None:
        self.budget = KeptBudget(1 << 20)
        self.kept = KeptStream(path, self.budget, 0, hides_ids=hides_ids) if keeps else None
        if self.kept is not None:
            self.kept.watch = lambda _, event: failure_in(event, event_object(event))
        self.usage = UsageRemover() if hides_usage else None
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self.pieces: list[bytes] = []
        self.between_chunks, self.ends_line = True, True
        self.broken = False

    def on_chunk_header(self) -> None:
        self.between_chunks = False

    def on_chunk_complete(self) -> None:
        self.between_chunks = True

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def feed(self, data: bytes) -> bytes:
        if self.broken:
            return b""
        self.pieces = []
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.broken = True
            return b""
        self.ends_line = data.endswith(b"\r\n")
        passed, kept = b"".join(self.pieces), self.kept
        if kept is not None:
            if kept.failure is not None:
                return b""
            passed = kept.feed(passed) if passed else b""
        return self.usage.feed(passed) if self.usage is not None and passed else passed

    @property
    def begins(self) -> bool:
        usage, kept = self.usage, self.kept
        at_chunk = self.between_chunks and self.ends_line and not self.broken
        return at_chunk and (usage is None or usage.idle) and (kept is None or kept.is_plain)

    def end(self) -> tuple[bytes, Any]:
        """The bytes that wait, and the answer that the client has."""
        rest = b"" if self.kept is None else self.kept.end()
        waiting = b"" if self.usage is None else self.usage.end()
        if self.kept is None:
            return rest + waiting, None
        so_far = asyncio.run(read_so_far(self.kept))
        seen = so_far.text, list(so_far.token_ids), so_far.prompt_ids, so_far.tokens, so_far.unfit, self.kept.failure
        self.kept.release()
        assert self.budget.held_bytes == 0
        return rest + waiting, seen


class Sockets:
    """A relay between two socket pairs."""

    def __init__(self) -> None:
        self.relay = NATIVE.Relay()
        self.engine, self.instance = socket.socketpair()
        self.client, self.reader = socket.socketpair()
        for each in (self.client, self.reader, self.engine, self.instance):
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)

    def close(self) -> None:
        self.relay.close()
        for each in (self.engine, self.instance, self.client, self.reader):
            each.close()

    def attach(self, flags: int, limit: int, data: bytes) -> int:
        return int(self.relay.attach(self.instance.fileno(), self.client.fileno(), flags, limit, data, MARK))

    def write(self, data: bytes) -> None:
        """Have the relay read these bytes, in one read if they are not long."""
        self.engine.sendall(data)
        deadline_s = time.monotonic() + WITHIN_S
        unread = array.array("i", [1])
        while unread[0] and time.monotonic() < deadline_s and not self.is_returned():
            fcntl.ioctl(self.instance, termios.FIONREAD, unread)
        self.relay.counts()  # it has the lock until the bytes have passed

    def is_returned(self) -> bool:
        self.found = self.relay.returned()
        self.back += [Returned(*stream) for _, stream in self.found]
        return bool(self.back)

    back: list[Returned]

    def read(self) -> bytes:
        got = b""
        while True:
            try:
                data = self.reader.recv(1 << 20)
            except BlockingIOError:
                return got
            if not data:
                return got
            got += data


def unchunked(wire: bytes) -> bytes:
    body = b""
    while wire:
        size, _, wire = wire.partition(b"\r\n")
        body += wire[: int(size, 16)]
        assert wire[int(size, 16) :][:2] == b"\r\n"
        wire = wire[int(size, 16) + 2 :]
    return body


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    made.back = []
    yield made
    made.close()


def relayed(pieces: list[bytes], path: Pythons, flags: int) -> tuple[bytes, bytes, Any, int]:
    """The bytes that the client gets of a stream that is offered to the relay wherever it may be, the part of an event
    with which it ends, what is kept, and how many chunks the relay has passed."""
    sockets = Sockets()
    sockets.back = []
    out, key = b"", 0
    for piece in pieces:
        if not key:
            room = 0
            if path.begins:
                room = path.kept.log_room(len(piece)) if path.kept is not None else 1
                key = sockets.attach(flags, room, piece) if room else 0
            if not key:
                out += path.feed(piece)
        else:
            sockets.write(piece)
        if key and sockets.is_returned():
            (back,), sockets.back = sockets.back, []
            key = 0
            out += taken_back(back, sockets, path, flags)
            unread = array.array("i", [0])
            fcntl.ioctl(sockets.instance, termios.FIONREAD, unread)
            if unread[0]:
                out += path.feed(sockets.instance.recv(1 << 20))
    if key:
        out += taken_back(Returned(*sockets.relay.take(key)), sockets, path, flags)
    rest, kept = path.end()
    chunks = sockets.relay.counts()[1]
    sockets.close()
    return out, rest, kept, chunks


def taken_back(back: Returned, sockets: Sockets, path: Pythons, flags: int) -> bytes:
    passed = unchunked(sockets.read() + back.unsent)
    assert passed[-4096:] == back.tail
    if path.kept is not None:
        path.kept.take_log(back.log)
    else:
        assert back.log == b""
    path.ends_line = True
    return passed + (path.feed(back.unread) if back.unread else b"")


def compare(path: str, wire: bytes, cuts: list[int], **how: bool) -> int:
    places = sorted({0, *(cut % (len(wire) + 1) for cut in cuts), len(wire)})
    pieces = [wire[start:stop] for start, stop in pairwise(places)]
    flags = EVENTS | {MESSAGE: MESSAGES, RESPONSE: RESPONSES}.get(path, 0)
    flags |= (KEEP if how["keeps"] else 0) | (HIDE_IDS if how["hides_ids"] and how["keeps"] else 0)
    flags |= HIDE_USAGE if how["hides_usage"] else 0
    both = [Pythons(path, **how) for _ in range(2)]
    first = b"%x\r\n%b\r\n" % (len(ROLE), ROLE)
    begun = [each.feed(first) for each in both]
    assert begun[0] == begun[1]
    expected = b"".join(both[0].feed(piece) for piece in pieces)
    rest, kept = both[0].end()
    got, got_rest, got_kept, chunks = relayed(pieces, both[1], flags)
    if both[0].broken:  # what came in one read with wrong framing is dropped with it, so it matters where it was cut
        finest = Pythons(path, **how)
        finest.feed(first)
        most = b"".join(finest.feed(wire[at : at + 1]) for at in range(len(wire)))
        assert got.startswith(expected) and most.startswith(got)
        return chunks
    assert got + got_rest == expected + rest
    assert got_kept == kept
    return chunks


bools = st.booleans()
cuts = st.lists(st.integers(0, 1 << 20), max_size=12)
groups = st.lists(st.sampled_from([1, 1, 1, 2, 3, -1]), max_size=6)


@settings(max_examples=80, deadline=None)
@given(
    stream=streams,
    groups=groups,
    style=st.sampled_from([0, 0, 0, 1, 2, 3]),
    cuts=cuts,
    hides=bools,
    usage=bools,
    keeps=bools,
)
def test_however_a_stream_is_cut_the_client_gets_the_same_and_the_same_is_kept(
    stream: list[bytes], groups: list[int], style: int, cuts: list[int], hides: bool, usage: bool, keeps: bool
) -> None:
    wire = as_chunks(stream, groups, style)
    compare(CHAT, wire, cuts, hides_ids=hides, hides_usage=usage, keeps=keeps)


@settings(max_examples=50, deadline=None)
@given(said=st.tuples(st.just(MESSAGE), messages) | st.tuples(st.just(RESPONSE), responses), groups=groups, cuts=cuts)
def test_however_a_message_or_a_response_is_cut_the_client_gets_the_same(
    said: tuple[str, list[bytes]], groups: list[int], cuts: list[int]
) -> None:
    path, stream = said
    compare(path, as_chunks(stream, groups, 0), cuts, hides_ids=False, hides_usage=False, keeps=True)


@settings(max_examples=40, deadline=None)
@given(
    stream=st.lists(plain, min_size=1, max_size=5),
    cuts=cuts,
    at=st.integers(0, 1 << 20),
    put=st.binary(max_size=3),
    lost=st.integers(0, 3),
)
def test_framing_that_is_wrong_is_left_to_python(
    stream: list[bytes], cuts: list[int], at: int, put: bytes, lost: int
) -> None:
    wire = as_chunks(stream, [], 0)
    at %= len(wire)
    compare(CHAT, wire[:at] + put + wire[at + lost :], cuts, hides_ids=True, hides_usage=True, keeps=True)


def test_every_place_to_cut_a_stream_gives_the_same() -> None:
    stream = [event(token("a", [1])), event(token("b", [2, 3])), event(token("c")), event(token("", finish="stop"))]
    wire = as_chunks(stream, [1, 2], 0) + b"0\r\n\r\n"
    chunks = [
        compare(CHAT, wire, [cut, cut + 7], hides_ids=True, hides_usage=True, keeps=True) for cut in range(len(wire))
    ]
    assert max(chunks) > 0


def test_plain_events_pass_without_python_and_their_log_is_short(sockets: Sockets) -> None:
    said = [event(token(f" w{n}", [n])) for n in range(1000)]
    key = sockets.attach(EVENTS | KEEP | HIDE_IDS, 1 << 20, as_chunks(said[:1], [], 0))
    assert key
    for start in range(1, len(said), 9):
        sockets.write(as_chunks(said[start : start + 9], [], 0))
    back = Returned(*sockets.relay.take(key))

    assert (back.chunks, back.unread, back.unsent) == (1000, b"", b"")
    assert b"".join(unpack(back.log)) == b"".join(said)
    assert len(back.log) < 20 * len(said)
    passed = unchunked(sockets.read())
    assert passed == re.sub(rb'"token_ids":\[\d+\]', b'"token_ids":null', b"".join(said))
    assert back.tail == passed[-4096:]


def test_what_is_not_plain_is_not_taken_and_nothing_of_it_is_sent(sockets: Sockets) -> None:
    wire = as_chunks([event(token("a")), event(token("", finish="stop"))], [1], 0)

    assert sockets.attach(EVENTS | KEEP, 1 << 20, wire) == 0
    assert sockets.attach(EVENTS, 0, wire[:9]) == 0
    assert sockets.read() == b""
    assert sockets.relay.counts() == (0, 0)


def test_a_stream_without_edits_passes_by_whole_events_whatever_is_in_them(sockets: Sockets) -> None:
    wire = b"5\r\nabc\n\n\r\n0003\r\nabc\r\n"
    key = sockets.attach(0, 0, wire[:10])
    assert key
    sockets.write(b"A\r\n01234567\n\n\r\n")
    sockets.write(wire[10:])  # a part of an event
    assert sockets.is_returned()
    (back,) = sockets.back

    assert sockets.read() == wire[:10] + b"A\r\n01234567\n\n\r\n"
    assert back.tail == b"abc\n\n01234567\n\n" and back.unread == wire[10:]


def test_a_stream_without_edits_is_given_back_at_a_usage_that_the_kept_end_may_cut(sockets: Sockets) -> None:
    """The end that is kept has 4096 bytes: a long last event is kept by Python."""
    short, long = ({"usage": {"input_tokens": 3}, "text": "x" * size} for size in (500, 5000))
    key = sockets.attach(0, 0, as_chunks([event(short)], [], 0))
    assert key
    sockets.write(as_chunks([event({"text": "y" * 5000})], [], 0))
    sockets.write(as_chunks([event(long)], [], 0))
    assert sockets.is_returned()
    (back,) = sockets.back

    assert back.chunks == 2 and back.unread == as_chunks([event(long)], [], 0)


@pytest.mark.parametrize("flags", [0, EVENTS, EVENTS | KEEP | HIDE_IDS])
def test_events_with_output_are_counted(sockets: Sockets, flags: int) -> None:
    text = 'finish_reason":null, "finish_reason":null'
    said = [event(token("a", [1])), event(token(text, [2, 3])), event(token("", None))]
    key = sockets.attach(flags, 1 << 20, as_chunks(said[:1], [], 0))
    sockets.write(as_chunks(said[1:], [], 0))
    back = Returned(*sockets.relay.take(key))

    assert (back.outputs, sum(each.count(MARK) for each in said)) == (3, 3)


@pytest.mark.parametrize("flags", [0, EVENTS | KEEP | HIDE_IDS])
def test_what_a_slow_client_does_not_take_comes_back_and_nothing_is_lost(sockets: Sockets, flags: int) -> None:
    sockets.client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    said = as_chunks([event(token("x" * 900)) for _ in range(20)], [], 0)
    key = sockets.attach(flags, 1 << 20, as_chunks([event(token("a"))], [], 0))
    sent = 1
    while not sockets.is_returned():
        sockets.write(said)
        sent += 20
        assert sent < 2000
    (back,) = sockets.back
    unread = back.unread
    while True:
        try:
            unread += sockets.instance.recv(1 << 20)
        except BlockingIOError:
            break

    assert back.reason == NATIVE.SLOW and back.unsent
    assert sockets.relay.take(key) is None
    body = unchunked(sockets.read() + back.unsent + unread)
    assert body.count(b'"content"') == sent
    assert body.endswith(back.tail if not unread else b"\n\n")


@pytest.mark.parametrize("resets", [False, True])
def test_the_end_of_the_instance_and_its_errors_come_back(sockets: Sockets, resets: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    engine = socket.create_connection(listener.getsockname())
    instance, _ = listener.accept()
    wire = as_chunks([event(token("a"))], [], 0)
    key = sockets.relay.attach(instance.fileno(), sockets.client.fileno(), EVENTS, 0, wire, MARK)
    if resets:
        engine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    engine.close()
    deadline_s = time.monotonic() + WITHIN_S
    while not sockets.is_returned() and time.monotonic() < deadline_s:
        pass
    (back,) = sockets.back

    assert key and (back.reason, bool(back.errno)) == ((NATIVE.BROKEN, True) if resets else (NATIVE.ENDED, False))
    instance.close()
    listener.close()


def test_a_log_stays_within_its_limit(sockets: Sockets) -> None:
    key = sockets.attach(EVENTS | KEEP, 2000, as_chunks([event(token("a"))], [], 0))
    said = 0
    while not sockets.is_returned():
        sockets.write(as_chunks([event(token(str(said)))], [], 0))
        said += 1
    (back,) = sockets.back

    assert key and back.reason == NATIVE.FULL and len(back.log) <= 2000
    assert unchunked(back.unread) == event(token(str(said - 1)))
    assert b"".join(unpack(back.log)).count(b"\n\n") == said


def test_streams_that_come_and_go_keep_their_own_bytes(sockets: Sockets) -> None:
    """Places are used again, and a key of the past finds nothing."""
    pairs = [(*socket.socketpair(), *socket.socketpair()) for _ in range(40)]
    keys = []
    for number, (_, instance, client, _) in enumerate(pairs):
        wire = as_chunks([event(token(f"first of {number}"))], [], 0)
        keys.append(sockets.relay.attach(instance.fileno(), client.fileno(), EVENTS, 0, wire, MARK))
    assert len(set(keys)) == 40 and sockets.relay.counts()[0] == 40
    taken = [sockets.relay.take(key) for key in keys[::2]]
    wire = as_chunks([event(token("again"))], [], 0)
    again = [sockets.relay.attach(pair[1].fileno(), pair[2].fileno(), EVENTS, 0, wire, MARK) for pair in pairs[::2]]
    assert all(taken) and not set(again) & set(keys)
    assert [sockets.relay.take(key) for key in keys[::2]] == [None] * 20
    for number, (_, _, _, reader) in enumerate(pairs):
        got = unchunked(reader.recv(1 << 16))
        assert got.startswith(event(token(f"first of {number}")))
        assert got.endswith(event(token("again"))) == (number % 2 == 0)
    for pair in pairs:
        for each in pair:
            each.close()


def test_a_relay_that_is_closed_takes_nothing(sockets: Sockets) -> None:
    wire = as_chunks([event(token("a"))], [], 0)
    assert sockets.attach(EVENTS, 0, wire)
    sockets.relay.close()
    sockets.relay.close()

    assert sockets.attach(EVENTS, 0, wire) == 0
    assert sockets.relay.counts()[0] == 0 and sockets.relay.returned() == []


async def test_a_relay_that_the_event_loop_cannot_watch_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", fail)
    relay = Relay(lambda chunks: None)

    assert [relay.attach(Mock(), -1, -1, 0, 0, b"") for _ in range(2)] == [0, 0]
    assert relay.streams == 0 and not relay.progressed(1)
    relay.close()
