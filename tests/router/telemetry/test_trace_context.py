"""W3C Trace Context: what a client sent is continued, else a trace begins."""

from __future__ import annotations

import pytest

from dualmap.router.telemetry.trace_context import TraceContext, TraceContexts

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


def header(flags: int, *, version: str = "00", more: str = "") -> bytes:
    return f"{version}-{TRACE:032x}-{SPAN:016x}-{flags:02x}{more}".encode()


@pytest.mark.parametrize(("flags", "sampled"), [(0, False), (1, True), (3, True)])
def test_the_clients_trace_and_its_decision_are_continued(flags: int, sampled: bool) -> None:
    context = TraceContexts(0.5).begin(header(flags))

    assert (context.trace_id, context.parent_id, context.sampled) == (TRACE, SPAN, sampled)
    assert context.span_id not in (0, SPAN)
    assert context.to_header() == f"00-{TRACE:032x}-{context.span_id:016x}-{int(sampled):02x}".encode()


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert TraceContexts(0.0).begin(header(1, version="cc", more="-what-else")).trace_id == TRACE


@pytest.mark.parametrize(
    "sent",
    [None, b"", b"00-aa-bb-01", header(1, version="ff"), b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01",
     b"00-" + b"1" * 32 + b"-" + b"0" * 16 + b"-01", header(1).upper()],
)  # fmt: skip
def test_without_a_valid_parent_a_trace_begins(sent: bytes | None) -> None:
    context = TraceContexts(1.0).begin(sent)

    assert context.parent_id == 0
    assert context.sampled
    assert context.trace_id not in (0, TRACE)


def test_the_share_of_traces_that_begin_here_is_as_wanted() -> None:
    traces = TraceContexts(0.25)
    sampled = sum(traces.begin(None).sampled for _ in range(4000))

    assert 800 < sampled < 1200
    assert not TraceContexts(0.0).begin(None).sampled
    assert TraceContext(1, 2, 0, False).to_header() == b"00-" + b"0" * 31 + b"1-" + b"0" * 15 + b"2-00"


def test_each_new_trace_has_ids_of_its_own_and_the_header_that_they_make() -> None:
    traces = TraceContexts(0.5)
    contexts = [traces.begin(None) for _ in range(1000)]

    assert len({context.trace_id for context in contexts}) == len({context.span_id for context in contexts}) == 1000
    assert all(context.to_header() == context._replace(made_header=None).to_header() for context in contexts)
