"""The trace that a request belongs to: W3C Trace Context in, and out to the instance.

Source: W3C Trace Context, level 1. ``tracestate`` is passed on as it came.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dualmap.runtime.own_random import own_random

FIELD = b"traceparent"

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1
_AT_ONCE = 64


class TraceContext(NamedTuple):
    """One request's place in a trace."""

    trace_id: int
    span_id: int
    """Id of the request's own span, the parent of its instance's span."""
    parent_id: int
    """Id of the client's span; 0 for a trace that begins here."""
    sampled: bool
    made_header: bytes | None = None
    """The header of the span, where it was made before it was needed."""

    def to_header(self) -> bytes:
        return self.made_header or _header(self.trace_id, self.span_id, self.sampled)


class TraceContexts:
    """The trace contexts of one replica's requests. Those of new traces are made many at a time: in one loop each takes
    a fraction of what it takes in the middle of a request, when the processor's caches hold other things."""

    def __init__(self, sample_share: float) -> None:
        """``sample_share`` (0..1): of the traces that begin here."""
        self._sample_share = sample_share
        self._new: list[TraceContext] = []

    def begin(self, header: bytes | None) -> TraceContext:
        """The context of a request with this ``traceparent``. A client that decided whether its trace is sampled is
        followed; without a header, or with one of another form, a new trace begins."""
        found = _TRACEPARENT.fullmatch(header) if header is not None else None
        if found is not None:
            trace_id, parent_id = int(found[1], 16), int(found[2], 16)
            if trace_id and parent_id:
                return TraceContext(
                    trace_id, own_random.getrandbits(64) or 1, parent_id, bool(int(found[3], 16) & _SAMPLED)
                )
        if not self._new:
            self._new = [self._new_trace() for _ in range(_AT_ONCE)]
        return self._new.pop()

    def _new_trace(self) -> TraceContext:
        trace_id, span_id = own_random.getrandbits(128) or 1, own_random.getrandbits(64) or 1
        sampled = own_random.random() < self._sample_share
        return TraceContext(trace_id, span_id, 0, sampled, _header(trace_id, span_id, sampled))


def _header(trace_id: int, span_id: int, sampled: bool) -> bytes:
    return b"00-%032x-%016x-%02x" % (trace_id, span_id, _SAMPLED if sampled else 0)
