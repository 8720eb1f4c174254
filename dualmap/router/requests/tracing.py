"""Spans of requests that ended, exported by OpenTelemetry in batches of its own thread.

A request is not followed while it lives: its explanation has all times, and becomes spans once it is over, if its trace
is sampled. So tracing costs the others a header, and nothing at all when it is off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dualmap.router.requests.explain import Explanation, PlacementRound
from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.trace_context import TraceContext
from dualmap.runtime.extras import how_to_install
from dualmap.runtime.trust import system_trust
from dualmap.scheduling.request.outcome import ANSWERED, Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_NS = 1_000_000_000
_CLOSE_S = 2.0


class TracingUnavailableError(ValueError):
    """Tracing is wanted, and the packages that it needs are not installed."""


class SpanExport:
    """Turns ended requests into spans and hands them to the exporter's batches."""

    def __init__(self, exporter: SpanExporter, replica_id: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._resource = Resource.create({"service.name": "dualmap-router", "service.instance.id": replica_id})
        self._batches = BatchSpanProcessor(exporter)

    def ended(self, explanation: Explanation, trace: TraceContext | None) -> None:
        if trace is not None and trace.sampled:
            for span in spans_of(explanation, trace, self._resource):
                self._batches.on_end(span)

    def close(self, within_s: float = _CLOSE_S) -> None:
        """Export what is left, for a bounded time.

        A thread of its own waits for the exporter: OpenTelemetry's calls last as long as a collector that takes
        connections and does not answer, whatever limit they get. A daemon thread does not keep the process either.
        """
        closing = threading.Thread(target=self._batches.shutdown, name="spans-close", daemon=True)
        closing.start()
        closing.join(within_s)


def open_tracing(settings: RouterSettings, replica_id: str) -> SpanExport | None:
    """The export, if ``tracing_url`` names where to; else None.

    Raises:
        TracingUnavailableError: packages are missing.
    """
    if settings.tracing_url is None:
        return None
    require_tracing(settings)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return SpanExport(OTLPSpanExporter(endpoint=settings.tracing_url, session=tracing_session()), replica_id)


def require_tracing(settings: RouterSettings) -> None:
    """Raises TracingUnavailableError if tracing is wanted and its packages are missing."""
    if settings.tracing_url is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as error:
        raise TracingUnavailableError(
            f"router.tracing_url needs OpenTelemetry: {how_to_install('tracing')}; or leave the setting out"
        ) from error


def tracing_session() -> Any:
    """A session that trusts what all clients of the product trust, beside its own CAs."""
    import requests
    from requests.adapters import HTTPAdapter

    class TrustingAdapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options, ssl_context=system_trust())

    session = requests.Session()
    session.mount("https://", TrustingAdapter())
    return session


def spans_of(explanation: Explanation, trace: TraceContext, resource: Any) -> Iterator[ReadableSpan]:
    """The request's span, and below it: each placement with its decision, hold, prefill, decode, retries."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    ids, flags = RandomIdGenerator(), TraceFlags(TraceFlags.SAMPLED)
    began_ns = round(explanation.course.received_unix_s * _NS)
    own = SpanContext(trace.trace_id, trace.span_id, is_remote=False, trace_flags=flags)

    def at_ns(time_s: float) -> int:
        return began_ns + round(time_s * _NS)

    def child(name: str, from_s: float, to_s: float, attributes: Mapping[str, Any], kind: SpanKind) -> ReadableSpan:
        context = SpanContext(trace.trace_id, ids.generate_span_id(), is_remote=False, trace_flags=flags)
        return ReadableSpan(
            name, context, own, resource, attributes, kind=kind, start_time=at_ns(from_s), end_time=at_ns(to_s)
        )

    done_s = explanation.course.done_s or 0.0
    failed = explanation.answer.outcome not in (*ANSWERED, Outcome.CLIENT_GONE)
    yield ReadableSpan(
        "request",
        own,
        SpanContext(trace.trace_id, trace.parent_id, is_remote=True, trace_flags=flags) if trace.parent_id else None,
        resource,
        _request_attributes(explanation),
        [
            Event("retry", {"dualmap.failure": failure}, at_ns(failed_s))
            for failure, failed_s in zip(explanation.detours.failures, explanation.detours.failed_after_s, strict=True)
        ],
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR, str(explanation.answer.outcome)) if failed else Status(StatusCode.UNSET),
        start_time=began_ns,
        end_time=at_ns(done_s),
    )
    placed_s, held_s = explanation.course.placed_s, explanation.course.held_s or 0.0
    for number, each in enumerate(explanation.rounds):
        last = number == len(explanation.rounds) - 1
        until_s = placed_s if last and placed_s is not None else 0.0
        yield child("placement", 0.0, until_s, _decision_attributes(each), SpanKind.INTERNAL)
    if placed_s is None:
        return
    sent_s = min(placed_s + held_s, done_s)
    if held_s > 0.0:
        yield child("hold", placed_s, sent_s, {}, SpanKind.INTERNAL)
    if explanation.answer.instance_id is None:
        return
    where = {"dualmap.instance": explanation.answer.instance_id}
    first_s = explanation.course.first_token_s
    if first_s is None:
        yield child("answer", sent_s, done_s, where, SpanKind.CLIENT)
    else:
        yield child("prefill", min(sent_s, first_s), first_s, where, SpanKind.CLIENT)
        yield child("decode", first_s, done_s, where, SpanKind.CLIENT)


def _request_attributes(explanation: Explanation) -> dict[str, Any]:
    attributes = {
        "gen_ai.request.model": explanation.origin.model,
        "gen_ai.usage.input_tokens": explanation.prompt_tokens,
        "gen_ai.usage.output_tokens": explanation.answer.usage.output_tokens,
        "dualmap.request_id": explanation.origin.request_id,
        "dualmap.pool": explanation.origin.pool,
        "dualmap.policy": explanation.terms.policy,
        "dualmap.instance": explanation.answer.instance_id,
        "dualmap.outcome": explanation.answer.outcome,
        "dualmap.slo_s": explanation.course.slo_s,
        "dualmap.ttft_s": explanation.course.first_token_s,
        "dualmap.expected_ttft_s": explanation.expected_ttft_s,
        "dualmap.cached_tokens.expected": explanation.answer.expected_cached_tokens,
        "dualmap.cached_tokens.reported": explanation.answer.usage.cached_tokens,
        "dualmap.key_blocks": explanation.prompt.key.blocks,
        "dualmap.attempts": explanation.answer.tries,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _decision_attributes(each: PlacementRound) -> dict[str, Any]:
    decision = each.decision
    attributes = {
        "dualmap.instance": decision.instance_id,
        "dualmap.reason": decision.reason.value,
        "dualmap.status": each.status.value,
        "dualmap.attempt": each.attempt,
        "dualmap.candidates": list(each.candidates),
        "dualmap.alternative": decision.alternative_id,
        "dualmap.hit_blocks": decision.hit_blocks,
        "dualmap.uncached_tokens": decision.uncached_tokens,
        "dualmap.expected_ttft_s": decision.expected_ttft_s,
    }
    return {name: value for name, value in attributes.items() if value is not None}
