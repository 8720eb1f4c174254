#!/bin/sh
# openai 3.57.0, opentelemetry-instrumentation-httpx 0.66b2 and httpx 0.28.1 from PyPI.
#
# Guess: a service that instruments httpx sends `traceparent` with the calls of its openai client, which is built on
# httpx.
# Seen: openai 3 is built on httpx2, another package with the same interface. Calls by httpx carry `traceparent`;
# those of openai carry none, without a warning, and the service's own span of the call is missing as well.
# For users: after the client's upgrade the traces of a fleet begin at the router, and no setting of the router helps:
# each request looks like a new trace. Inject the header by hand (`extra_headers`) or by an instrumentation of openai
# itself.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check openai==3.57.0 httpx==0.28.1 \
  opentelemetry-sdk==1.45.2 opentelemetry-instrumentation-httpx==0.66b2 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
import httpx, openai
from opentelemetry import propagate, trace
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
from opentelemetry.sdk.trace import TracerProvider

class Noting(http.server.BaseHTTPRequestHandler):
    traced = None

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Noting.traced = "traceparent" in self.headers
        choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Noting)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}/v1"
trace.set_tracer_provider(TracerProvider())
HTTPXClientInstrumentor().instrument()
request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

def by_hand():
    headers = {}
    propagate.inject(headers)
    openai.OpenAI(base_url=base, api_key="k").chat.completions.create(**request, extra_headers=headers)

calls = {
    "httpx": lambda: httpx.post(f"{base}/chat/completions", json=request),
    "openai": lambda: openai.OpenAI(base_url=base, api_key="k").chat.completions.create(**request),
    "openai, header by hand": by_hand,
}
seen = {}
with trace.get_tracer("service").start_as_current_span("turn"):
    for name, call in calls.items():
        call()
        seen[name] = Noting.traced
        print(f"{name}: {'with' if Noting.traced else 'without'} traceparent")
raise SystemExit(0 if seen == {"httpx": True, "openai": False, "openai, header by hand": True} else 1)
PROGRAM
