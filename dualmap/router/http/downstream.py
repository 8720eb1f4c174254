"""The client of one answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from dualmap.router.errors import RouterError
from dualmap.router.http.plain_heads import Header

if TYPE_CHECKING:
    from dualmap.router.http.answer_driver import AnswerDriver


class ByteSource(Protocol):
    """The source of an answer's bytes; stopped while the client is slower."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def probe(self) -> None:
        """Send the client bytes that it skips, if the framing allows: a write to a client that has left fails."""

    def give_up(self, error: RouterError) -> None:
        """Break the answer off with ``error``, in a form that its client understands."""


class Downstream(Protocol):
    """The client of one answer. Writes are never awaited: pressure goes back through the byte source."""

    path: str
    """Path of the request: it decides the shape of errors."""
    page_fields: Sequence[Header]
    """CORS fields for the browser of a requesting page; part of every answer's head."""
    received_s: float
    """When work on the request began, by the loop's clock."""
    http_10: bool
    """The client speaks HTTP/1.0: no chunked framing, and the connection closes behind the answer."""
    bodiless: bool
    """The request was HEAD: the answer has a head alone."""
    committed: bool
    """The head is written: the answer can no longer become another one."""
    gone: bool
    """The client has disconnected."""
    between_events: bool
    """The stream was behind a whole event when an instance failed it: while it has no source, comments probe it."""
    file: int
    """Descriptor of a plain connection to the client, to which bytes go as they are; else -1."""

    def keeps_alive(self) -> bool:
        """Whether the connection stays open behind this answer; called once, when its head is built."""

    def write(self, data: bytes) -> None:
        """Send bytes of the answer; its head must come first."""

    def write_head(self, head: bytes) -> None:
        """Send the head: from here on the answer is committed."""

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None:
        """Answer with an error as a whole, or break the connection if another answer has begun."""

    def set_source(self, source: ByteSource | None) -> None:
        """Connect back-pressure: the source is paused while the client's buffer is full."""

    def close_after(self) -> None:
        """Close the connection behind this answer."""

    def abort(self) -> None:
        """Break the connection, so that the client notices that the answer is not whole."""

    def cut_off(self, error: RouterError) -> bool:
        """End the present answer with an error; False if there is none."""

    def break_off(self, last_words: bytes) -> None:
        """Send ``last_words``, then close without the end that the framing announced."""

    def may_lend(self) -> bool:
        """Whether another one may write to ``file`` now: nothing is waiting to be sent."""

    def lend(self, to: AnswerDriver) -> None:
        """``to`` writes from here on, and ends the loan. It is told to take the answer back before anything else is
        written, and when the connection is lost."""

    def end_loan(self) -> None:
        """The loan is over."""
