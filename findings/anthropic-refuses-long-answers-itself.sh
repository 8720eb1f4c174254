#!/bin/sh
# anthropic 2.14.0 from PyPI, as the client of a router that serves other models by Anthropic's API.
#
# Guess: `max_tokens` is the server's affair; the client sends the request and waits as long as its timeout says.
# Seen: from 21,334 on, a request that is not streamed raises ValueError in the client and nothing is sent: it takes
# 128,000 tokens an hour for the speed of any model. Streamed, or with a `timeout` given to the client, even the
# default of 600 s, the same request is sent.
# For users: the failure stands in no log and no metric of the server, and comes and goes with an unrelated argument.
# Tell callers of long answers to stream or to pass `timeout`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check anthropic==2.14.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
import anthropic

class Answering(http.server.BaseHTTPRequestHandler):
    requests = 0

    def do_POST(self):
        Answering.requests += 1
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {
            "id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
            "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
        }
        started = {"type": "message_start", "message": message}
        answer = f"event: message_start\ndata: {json.dumps(started)}\n\n" if body.get("stream") else json.dumps(message)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if body.get("stream") else "application/json")
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = {}
for max_tokens in (21_333, 21_334):
    for label, options, stream in (("", {}, False), (", streamed", {}, True), (", timeout=600", {"timeout": 600}, False)):
        Answering.requests = 0
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="k", **options)
        request = {"model": "llama", "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hi"}]}
        try:
            answer = client.messages.create(**request, stream=stream)
            if stream:
                list(answer)
            found = "answered"
        except ValueError as error:
            found = f"ValueError: {str(error)[:72]}..."
        seen[max_tokens, label] = (found == "answered", Answering.requests)
        print(f"max_tokens={max_tokens}{label}: {found}, {Answering.requests} requests")
refused = (21_334, "")
raise SystemExit(0 if all(found == ((False, 0) if case == refused else (True, 1)) for case, found in seen.items()) else 1)
PROGRAM
