#!/bin/sh
# prometheus_client 0.26.0 from PyPI, the exporter inside vLLM (0.22.1 for comparison).
#
# Guess: the names of metrics do not depend on the format that the scraper asks for: `vllm:num_requests_running` is a
# valid name in the text format and in OpenMetrics, where a colon is legal.
# Seen: since 0.23 the answer to `Accept: application/openmetrics-text; version=1.0.0`, which Prometheus 2 sends
# first, has samples `vllm_num_requests_running`, below HELP and TYPE lines of `vllm:num_requests_running`. With 0.22,
# with `Accept: */*`, and with the `escaping=allow-utf-8` of Prometheus 3 the name is `vllm:num_requests_running`.
# For users: after an upgrade of the engine's image a Prometheus 2 finds no `vllm:` series: dashboards are empty, and
# alerts and autoscalers on them are silent. curl shows the expected names. Remedy: Prometheus 3, or
# `scrape_protocols: [PrometheusText0.0.4]` (Prometheus 2.49 and newer). The fleet reads and writes the text format
# alone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 0.22.1 0.26.0; do
  python3 -m venv "$folder/$version" && "$folder/$version/bin/pip" install -q --disable-pip-version-check prometheus_client==$version || exit 2
  echo "prometheus_client $version"
  "$folder/$version/bin/python" - $version <<'PROGRAM'
import sys
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder

registry = CollectorRegistry()
Gauge("vllm:num_requests_running", "Running requests", registry=registry).set(1)
accepted = {
    "curl": "*/*",
    "Prometheus 2": "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}
seen = {}
for scraper, accept in accepted.items():
    encode, content_type = choose_encoder(accept)
    lines = encode(registry).decode().splitlines()
    seen[scraper] = next(line.split()[0] for line in lines if not line.startswith("#"))
    print(f"  {scraper}: {seen[scraper]} as {content_type}")
renamed = "vllm_num_requests_running" if sys.argv[1] == "0.26.0" else "vllm:num_requests_running"
expected = {"curl": "vllm:num_requests_running", "Prometheus 2": renamed, "Prometheus 3": "vllm:num_requests_running"}
raise SystemExit(0 if seen == expected else 1)
PROGRAM
done
