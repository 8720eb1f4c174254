"""The trace that a request belongs to: W3C Trace Context in, and out to the instance.

Source: W3C Trace Context, level 1. ``tracestate`` is passed on as it came.
"""

from __future__ import annotations

import os
import re
from random import Random
from typing import NamedTuple

FIELD = b"traceparent"

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1
_random = Random(os.urandom(32))


class TraceContext(NamedTuple):
    """One request's place in a trace."""

    trace_id: int
    span_id: int
    """Of the request's own span: what its instance takes for the parent."""
    parent_id: int
    """Of the client's span; 0 for a trace that begins here."""
    sampled: bool

    def to_header(self) -> bytes:
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, _SAMPLED if self.sampled else 0)


def begin(header: bytes | None, sample_share: float) -> TraceContext:
    """The context of a request with this ``traceparent``. A client that decided whether its trace is sampled is
    followed; else ``sample_share`` (0..1) of the requests are. A header of another form begins a new trace."""
    bits = _random.getrandbits
    found = _TRACEPARENT.fullmatch(header) if header is not None else None
    if found is not None:
        trace_id, parent_id = int(found[1], 16), int(found[2], 16)
        if trace_id and parent_id:
            return TraceContext(trace_id, bits(64) or 1, parent_id, bool(int(found[3], 16) & _SAMPLED))
    return TraceContext(bits(128) or 1, bits(64) or 1, 0, _random.random() < sample_share)
