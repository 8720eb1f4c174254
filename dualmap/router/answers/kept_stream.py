"""The bytes that are kept of streams, so that another instance can go on with them: bounded, and read only in need.

Events of a stream hardly differ from each other: compressed, they take ten bytes for a token, and the time for that is
short beside what passing them on takes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Final

from dualmap.router.answers.so_far import AnswerSoFar, prompt_ids_in
from dualmap.router.answers.sse import EventSplitter, event_object, is_comment
from dualmap.router.prompts.inference_request import MESSAGES_PATH, RESPONSES_PATH
from dualmap.router.relay.event_log import unpack
from dualmap.scheduling.request.outcome import InstanceFailure

STEP_BYTES: Final = 8 << 10
"""Memory is taken from the budget in steps of this."""
PACKED_BYTES: Final = 16 << 10
"""So many bytes of events are compressed at once where much memory is taken, and four times as many otherwise: most
streams end before that."""
_LEVEL: Final = 1
MAX_BYTES: Final = 4 << 20
"""Most bytes that are kept of a stream, with the body of its request; a longer one is not continued."""
EVENT_BYTES: Final = 64
"""An event takes this beside its bytes."""
MAX_EVENT_BYTES: Final = 8 << 20
"""Longest event: the first one may list all tokens of the prompt."""
WATCHED_BYTES: Final = 64 << 10
"""Longest event of a stream that is watched alone; more of one passes as it comes, and announces no failure."""
_MOST_BEHIND: Final = 64
"""Most events that are kept behind the one that has announced a failure."""
_FAILURE_WORDS: Final = (b'"error', b'"abort', b'"recompute')
"""An event by which an instance fails an answer has one of them. None ends with a quote: there are too many of them."""
_MESSAGE_WORDS: Final = (*_FAILURE_WORDS, b'"message_delta')
"""An event by which an instance fails a message has one of these: the one that ends an aborted message is known by the
reason that it lacks."""
_RESPONSE_WORDS: Final = (b'"error', b"response.failed", b'"cancelled')
"""An event by which an instance fails a response has one of these; one that is aborted ends as if it was cancelled."""
_MESSAGE_DONE: Final = (b'"response.output_text.done"', b'"response.output_item.done"')
"""An event that begins the end of a response's message has one of these."""
_MESSAGE_ENDS: Final = frozenset(
    {"response.output_text.done", "response.content_part.done", "response.output_item.done"}
)
_WORDS: Final = {MESSAGES_PATH: _MESSAGE_WORDS, RESPONSES_PATH: _RESPONSE_WORDS}
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_GOES_ON: Final = b'finish_reason":null'
"""An event of a chat or a completion has this if it does not end its choice. Searched from the end, it costs little."""
_IDS: Final = b'token_ids":'
_IDS_BYTES: Final = len(_IDS)
_OPEN_IDS: Final = _IDS + b"["
_LISTED: Final = re.compile(rb'token_ids":\[[^\]]*\]')
_SPACED_IDS: Final = b'token_ids": ['
_SPACED_LISTED: Final = re.compile(rb'token_ids": \[[^\]]*\]')


Unpack = Callable[[bytes], list[bytes]]
"""Unpacks events, into slices that are read in a millisecond each."""


def _whole(events: bytes) -> list[bytes]:
    return [events]


def _decompressed(packed: bytes) -> list[bytes]:
    return [zlib.decompress(packed)]


class KeptBudget:
    """The memory that all kept streams of a replica may take."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self.lost = 0
        """Streams that were not kept to their end, as there was no memory for more of them."""

    def take(self, count: int) -> bool:
        """Count bytes that are kept; False if they are too many. The caller must call ``give_back`` for them."""
        if self.held_bytes + count > self._limit_bytes:
            return False
        self.held_bytes += count
        return True

    def give_back(self, count: int) -> None:
        self.held_bytes -= count

    @property
    def is_scarce(self) -> bool:
        """Whether more than half of it is taken."""
        return 2 * self.held_bytes > self._limit_bytes


class KeptStream:
    """One stream, passed on by whole events, and what is kept of it. The caller must call ``release``.

    ``hides_ids``: the ids of tokens were asked for by the router, and what is passed on is without them.
    """

    is_plain = False
    """The next byte begins an event, which is not the first one."""
    lost = False
    """The stream is not kept any more, or never was: its failures are watched alone."""
    watch: Callable[[KeptStream, bytes], InstanceFailure | None] | None = None
    """Says what failure an event of this stream announces, the first one apart. An event that does is not passed on,
    nor what is behind it."""
    failure: InstanceFailure | None = None
    """The failure that an event has announced."""
    failed_by = b""
    """That event."""
    on_loss: Callable[[], None] | None = None
    """Called where it is kept no more, as there is too much of it."""
    _behind: Sequence[bytes] = ()
    """The last events behind that one."""
    _message_end = b""
    """The last events, which end a response's message: they are passed on with the next one. An instance that
    aborts an answer ends its message, too, and that must then go on."""
    _splitter: EventSplitter | None = None
    _first = True
    _reserved = 0

    def __init__(
        self, path: str, budget: KeptBudget, body_bytes: int, *, hides_ids: bool, so_far: AnswerSoFar | None = None,
        is_ended_by_client: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """``path``: of the API that answers. ``so_far``: what the client has of the answer already, or of which answers
        it is one stream. ``is_ended_by_client``: its client has asked instances to abort it."""
        self.is_ended_by_client = is_ended_by_client
        self._path = path
        self._failure_words = _WORDS.get(path, _FAILURE_WORDS)
        self._budget = budget
        self.hides_ids = hides_ids
        self._events: list[bytes] = []
        self._packed: list[tuple[Unpack, bytes]] = []
        """The events before ``_events``, and how they are unpacked."""
        self._bytes = self._packed_bytes = body_bytes
        self._so_far = so_far
        self._is_several = so_far is not None and bool(so_far.others)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; returns what is to be passed on: whole events, or nothing."""
        if self.is_plain and data.rfind(_GOES_ON) >= 0 and data.find(b"\n\n") == len(data) - 2:
            # One event of an answer that goes on, as nearly all are: nothing more is searched in it.
            self._events.append(data)
            kept = self._bytes = self._bytes + len(data) + EVENT_BYTES
            if kept > self._reserved:
                self._grow()
            if self.hides_ids and (at := data.rfind(_OPEN_IDS)) >= 0:
                return data[: at + _IDS_BYTES] + b"null" + data[data.find(b"]", at) + 1 :]
            return data
        data = self._feed(data)
        waits = self._splitter is not None or bool(self._message_end)
        self.is_plain = not (waits or self._first or self._is_several) and self.failure is None
        return data

    def _feed(self, data: bytes) -> bytes:
        """Take bytes that may be several events, or parts of one."""
        if self._splitter is not None or not data.endswith(_EVENT_ENDS):
            data = self._whole(data)
            if not data:
                return data
        if self._message_end:
            data, self._message_end = self._message_end + data, b""
        begins = self._first
        if begins:
            data = self._first_events(data)
            begins = not self._first
        if self.failure is not None:
            self._behind = [*self._behind, data][-_MOST_BEHIND:]
            return b""
        if self.watch is not None:
            for word in self._failure_words:
                if word in data:
                    data = self._before_failure(data, partial(self.watch, self), 1 if begins else 0)
                    if not data:
                        return data
                    break
        if self._path == RESPONSES_PATH and not self.lost:
            data, end = _before_message_end(data)
            if self.failure is None:
                self._message_end = end
            if not data:
                return data
        self._events.append(data)
        kept = self._bytes = self._bytes + len(data) + EVENT_BYTES
        if kept > self._reserved:
            self._grow()
        return without_ids(data) if self.hides_ids else data

    @property
    def holds_end(self) -> bool:
        """Whether its last events wait for the next one: they end a message."""
        return bool(self._message_end)

    # what passes the native relay --------------------------------------------------------------------------------
    def log_room(self, event_bytes: int) -> int:
        """Bytes that the log of events that pass the relay may take, the first of which have so many; 0: there is no
        memory for it."""
        room = self._reserved - self._bytes - 3 * EVENT_BYTES
        missing = max(STEP_BYTES, 4 * event_bytes) - room
        if missing <= 0:
            return room
        wanted = STEP_BYTES * (1 + missing // STEP_BYTES)
        if self._reserved + wanted > MAX_BYTES or not self._budget.take(wanted):
            return 0
        self._reserved += wanted
        return room + wanted

    def take_log(self, log: bytes) -> None:
        """Keep the log of events that have passed the relay."""
        if self.lost or not log:
            return
        if self._events:
            self._pack(_whole, b"".join(self._events))
            self._events.clear()
        self._pack(unpack, log)
        if self._bytes > self._reserved:
            self._grow()

    def end(self) -> bytes:
        """The bytes that are not passed on when the stream ends: the end of a message, and a part of an event."""
        splitter, self._splitter = self._splitter, None
        end, self._message_end = self._message_end, b""
        return end if splitter is None else end + splitter.rest

    def reading(self) -> Generator[None, None, AnswerSoFar]:
        """Read the part of the answer that the client has, which is returned. What is kept is read in slices of a
        millisecond, each of which is kept no more. Between them the driver does other work: a long answer takes
        seconds."""
        so_far = self._so_far = self._so_far or AnswerSoFar()
        while self._packed or self._events:
            if self._packed:
                unpacked, packed = self._packed.pop(0)
                events, *later = unpacked(packed)
                self._packed[:0] = [(_whole, each) for each in later]
            else:
                events, self._events = b"".join(self._events), []
            so_far.read(self._path, events)
            yield
        if self._behind:
            so_far.count_by(self._path, b"".join(self._behind))
        return so_far

    def release(self) -> None:
        """The stream is over."""
        self._budget.give_back(self._reserved)
        self._reserved, self.on_loss = 0, None
        self._events, self._packed = [], []
        self.lost = True

    def _whole(self, data: bytes) -> bytes:
        """The events that are complete now."""
        splitter = self._splitter
        if splitter is None:
            most = WATCHED_BYTES if self.lost else MAX_EVENT_BYTES
            splitter = self._splitter = EventSplitter(most, whole_ends=not self.lost)
        whole = b"".join(splitter.feed(data))
        if not splitter.rest:
            self._splitter = None
        elif splitter.only_comments:
            whole += splitter.take(len(splitter.rest))
        elif splitter.too_long:
            whole += splitter.take(len(splitter.rest))
            self._lose()
        return whole

    def _before_failure(self, data: bytes, fails: Callable[[bytes], InstanceFailure | None], judged: int) -> bytes:
        """The events before one that announces a failure, or all of the data. So many of the first, but for comments,
        are for others to judge."""
        passed, rest = [], EventSplitter(MAX_EVENT_BYTES).feed(data)
        while rest and self.failure is None:
            if judged and not is_comment(rest[0]):
                judged -= 1
            else:
                self.failure = fails(rest[0])
                self.failed_by = rest[0]
            if self.failure is None:
                passed.append(rest.pop(0))
        if self.failure is None:
            return data  # with the part of an event that is too long to be held
        self._behind = [*self._behind, *rest][-_MOST_BEHIND:]
        return b"".join(passed)

    def _first_events(self, data: bytes) -> bytes:
        """The first events, without the ids of the prompt's tokens if they are to be hidden: those are kept apart."""
        if is_comment(data):
            return data
        self._first = False
        span = None if self._is_several else prompt_ids_in(data)  # else each answer may come with those of its prompt
        if span is None:
            return data
        if self._so_far is None:
            self._so_far = AnswerSoFar()
        if self._so_far.prompt_ids is None:
            ids = self._so_far.prompt_ids = data[slice(*span)]
            self._bytes += len(ids)
            self._packed_bytes += len(ids)
        return data[: span[0] - 1] + b"null" + data[span[1] + 1 :] if self.hides_ids else data

    def _grow(self) -> None:
        """Take memory for what is kept, after it was compressed where that is much."""
        if self.lost:
            self.release()
            self._bytes = 0
            return
        loose_bytes = self._bytes - self._packed_bytes
        if loose_bytes > 4 * PACKED_BYTES or (loose_bytes > PACKED_BYTES and self._budget.is_scarce):
            self._pack(_decompressed, zlib.compress(b"".join(self._events), _LEVEL))
            self._events.clear()
        missing = self._bytes - self._reserved
        wanted = STEP_BYTES * (1 + missing // STEP_BYTES)
        if missing <= 0:
            return
        if self._bytes > MAX_BYTES or not self._budget.take(wanted):
            self._lose()
            return
        self._reserved += wanted

    def _pack(self, unpack: Unpack, packed: bytes) -> None:
        self._packed.append((unpack, packed))
        self._packed_bytes += len(packed) + EVENT_BYTES
        self._bytes = self._packed_bytes

    def _lose(self) -> None:
        """Keep it no more."""
        first, self.lost, on_loss = not self.lost, True, self.on_loss
        self._budget.lost += first
        self.release()
        if first and on_loss is not None:
            on_loss()


def _before_message_end(data: bytes) -> tuple[bytes, bytes]:
    """Whole events of a response, and apart from them those that end a message, if none but comments follow them."""
    if not any(word in data for word in _MESSAGE_DONE):
        return data, b""
    splitter = EventSplitter(MAX_EVENT_BYTES)
    passed, ends = splitter.feed(data), list[bytes]()
    at = len(passed)
    while at and (is_comment(passed[at - 1]) or _ends_message(passed[at - 1])):
        at -= 1
        if not is_comment(passed[at]):
            ends.append(passed.pop(at))
    return b"".join([*passed, splitter.rest]), b"".join(reversed(ends))


def _ends_message(event: bytes) -> bool:
    found = event_object(event)
    if found is None or found.get("type") not in _MESSAGE_ENDS:
        return False
    item = found.get("item")
    return not isinstance(item, dict) or item.get("type") == "message"


def without_ids(data: bytes) -> bytes:
    """Events as they would be had the ids of their tokens not been asked for."""
    at = data.find(_OPEN_IDS)
    if at >= 0:
        end = data.find(b"]", at)
        if data.find(_OPEN_IDS, end) < 0:  # one event: cut out by hand, in a third of the time
            return data[: at + _IDS_BYTES] + b"null" + data[end + 1 :]
        return _LISTED.sub(_IDS + b"null", data)
    return _SPACED_LISTED.sub(b'token_ids": null', data) if _SPACED_IDS in data else data
