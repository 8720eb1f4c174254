"""The mark by which output is counted in a stream: each event with output has it once, and hardly another event has.

An event with output has one token at least, so what is counted so is never more than the tokens of the answer. A mark
is structure: in a text, which a client or a model can write, quotes and line ends are escaped. Events of a chat that
end a choice are not counted, as they need not have a token.
"""

from __future__ import annotations

from typing import Final

from dualmap.router.prompts.inference_request import COMPLETIONS_PATHS, MESSAGES_PATH, RESPONSES_PATH

_CHOICES: Final = (b'finish_reason":null', b'finish_reason": null')
_MARKS: Final = {
    **dict.fromkeys(COMPLETIONS_PATHS, _CHOICES),
    MESSAGES_PATH: (b"event: content_block_delta\n", b'"content_block_delta"'),
    RESPONSES_PATH: (b".delta\n", b'.delta"'),
}
"""The marks of an API, as engines write it, and as others do. The native relay counts by the first one, too."""
_REASON: Final = b"finish_reason"
EVENT_END: Final = b"\n\n"


def output_mark(path: str, event: bytes) -> bytes:
    """The mark of the stream of which this is the first event with output."""
    marks = _MARKS.get(path, _CHOICES)
    for mark in marks:
        if mark in event:
            return mark
    if marks is not _CHOICES or _REASON in event:  # an event of another kind, or one that ends a choice
        return marks[0]
    return EVENT_END if event.endswith(EVENT_END) else event[-4:] if event.endswith(b"\r\n\r\n") else event[-2:]


def cut_mark(mark: bytes, before: bytes, piece: bytes) -> int:
    """1 where the mark begins in the piece before, and ends in this one; else 0."""
    part = len(mark) - 1
    return (before[-part:] + piece[:part]).count(mark)


def first_outputs(mark: bytes, events: bytes) -> int:
    """The events with output among these, of which the first is one."""
    return events.count(mark) or 1
