"""Spans of requests that ended, received and decoded as a collector does."""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from dualmap.router.requests.explain import Answer, Course, Explanation, KeyedPrompt, Origin, Terms
from dualmap.router.requests.tracing import SpanExport, TracingUnavailableError, open_tracing, tracing_session
from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.trace_context import TraceContext, TraceContexts
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.state.hotness import HashKey
from tests.router import tools

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry-exporter-otlp-proto-http")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


class Collector:
    """An OTLP receiver over HTTP."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                sent = service.ExportTraceServiceRequest()
                sent.ParseFromString(body)
                collector.requests.append(sent)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(service.ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def spans(self) -> dict[str, Any]:
        """By name; the tests make one request each."""
        return {
            span.name: span
            for sent in self.requests
            for resource in sent.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


SAMPLED = TraceContext(0xA1, 0xB2, 0xC3, True)


async def test_a_request_becomes_spans_with_its_decision_as_attributes(
    collector: Collector, start_runtime: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), tracing_url=collector.url)
    request = await runtime.intake.place(tools.request("x" * 400, request_id="one", trace=SAMPLED))
    await clock.advance(0.25)
    request.first_token()
    await clock.advance(0.5)
    request.finish(Outcome.COMPLETED, Usage(prompt_tokens=105, cached_tokens=16, output_tokens=7))

    await runtime.stop()

    spans = collector.spans()
    assert set(spans) == {"request", "placement", "prefill", "decode"}
    whole = spans["request"]
    assert {int.from_bytes(span.trace_id, "big") for span in spans.values()} == {0xA1}
    assert (int.from_bytes(whole.span_id, "big"), int.from_bytes(whole.parent_span_id, "big")) == (0xB2, 0xC3)
    assert {span.parent_span_id for name, span in spans.items() if name != "request"} == {whole.span_id}
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == pytest.approx(0.75e9, rel=1e-3)
    assert spans["decode"].end_time_unix_nano - spans["decode"].start_time_unix_nano == pytest.approx(0.5e9, rel=1e-3)
    assert spans["prefill"].end_time_unix_nano == spans["decode"].start_time_unix_nano
    told = attributes(whole)
    assert (told["dualmap.request_id"], told["gen_ai.usage.output_tokens"]) == ("one", 7)
    decided = attributes(spans["placement"])
    assert decided["dualmap.instance"] == told["dualmap.instance"] == request.machine.instance_id
    assert decided["dualmap.reason"] == "balance"
    assert {each.string_value for each in decided["dualmap.candidates"].values} == {"a", "b"}


async def test_a_retry_is_an_event_and_a_failed_request_an_error(
    collector: Collector, start_runtime: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), tracing_url=collector.url)
    request = await runtime.intake.place(tools.request(trace=SAMPLED))
    await clock.advance(0.1)
    await request.failed(Failed(InstanceFailure(FailureKind.CONNECT, "refused")))
    request.finish(Outcome.UPSTREAM_FAILED)

    await runtime.stop()

    whole = collector.spans()["request"]
    [event] = whole.events
    assert event.name == "retry"
    assert event.time_unix_nano - whole.start_time_unix_nano == pytest.approx(0.1e9, rel=1e-2)
    assert whole.status.code == 2
    assert whole.status.message == "upstream_failed"


async def test_what_is_not_sampled_is_not_exported(collector: Collector, start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),), tracing_url=collector.url)
    for trace in (None, TraceContexts(0.0).begin(None)):
        (await runtime.intake.place(tools.request(trace=trace))).finish(Outcome.COMPLETED)

    await runtime.stop()

    assert collector.requests == []


def test_a_collector_that_never_answers_does_not_hold_up_the_end() -> None:
    begun, answered = threading.Event(), threading.Event()

    class Hanging:
        def export(self, spans: Any) -> None:
            begun.set()
            answered.wait()

        def shutdown(self) -> None: ...

    exporter: Any = Hanging()
    export = SpanExport(exporter, "r")
    prompt = KeyedPrompt(10, 1, 16, 1, 2, "", HashKey(1, 2**64 - 1, 16, 3, 4))
    request = Explanation(
        Origin("one", "m", "default"), Terms("dualmap"), prompt, Course(0.0, 5.0), Answer("a", "completed")
    )
    export.ended(request, SAMPLED)
    try:
        export.close(within_s=0.05)

        assert begun.wait(5)  # what is left was handed over
    finally:
        answered.set()


def test_missing_packages_are_named_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)

    assert open_tracing(RouterSettings(), "r") is None
    with pytest.raises(TracingUnavailableError, match=r"pip install .*opentelemetry-sdk"):
        open_tracing(RouterSettings(tracing_url="http://collector:4318/v1/traces"), "r")


def test_a_collector_with_a_certificate_of_the_systems_ca_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, ca_file = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost").configure_cert(tls)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
        try:
            with tracing_session() as session:
                assert session.get(f"https://localhost:{server.server_port}/", timeout=10).status_code == 204
        finally:
            server.shutdown()
