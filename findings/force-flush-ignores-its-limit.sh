#!/bin/sh
# opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http 1.45.2 from PyPI, with a collector that does not
# answer.
#
# Guess: `force_flush(timeout_millis=500)` of the batches returns False after half a second, as its specification
# says.
# Seen: it waits for the exporter's own timeout (10 s by default, 3 here) and then returns True, though nothing was
# exported. Durations of `OTEL_EXPORTER_OTLP_TIMEOUT` are seconds here, unlike those of `OTEL_BSP_*`: a value meant as
# milliseconds makes that wait an hour.
# For users: a service that flushes its spans at the end stays as long, past its grace period, whenever the collector
# hangs and not when it is gone. Flush in a daemon thread and wait for that, as the fleet does
# (docs/operate/monitoring.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2 || exit 2
OTEL_EXPORTER_OTLP_TIMEOUT=3 "$folder/venv/bin/python" - <<'PROGRAM'
import socket, threading
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

class Reporting(OTLPSpanExporter):
    result = None

    def export(self, spans):
        Reporting.result = super().export(spans)
        return Reporting.result

collector = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers
batches = BatchSpanProcessor(Reporting(endpoint=f"http://127.0.0.1:{collector.getsockname()[1]}/v1/traces"))
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(batches)
provider.get_tracer("script").start_span("span").end()
returned = []
flush = threading.Thread(target=lambda: returned.append(batches.force_flush(timeout_millis=500)))
flush.start()
flush.join(1.5)  # three times the limit
late = flush.is_alive()
flush.join()
print(f"still waiting at three times its limit: {late}; returned {returned[0]}; the export: {Reporting.result.name}")
raise SystemExit(0 if late and returned == [True] and Reporting.result.name == "FAILURE" else 1)
PROGRAM
