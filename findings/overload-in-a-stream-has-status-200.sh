#!/bin/sh
# anthropic 2.14.0 and openai 3.57.0 from PyPI, on errors that come after a stream has begun.
#
# Guess: `event: error` with `overloaded_error`, by which the messages API reports an overload within a stream, raises
# what a status 529 raises, OverloadedError, a kind of InternalServerError; so code that waits and tries again on it
# does here too.
# Seen: it raises a bare APIStatusError with `status_code` 200, also where it is the first event of the stream.
# openai raises a bare APIError without a status for its own form of the same, whatever `type` and `code` say. Neither
# tries again, though nothing was received.
# For users: `except InternalServerError`, rules by `status_code >= 500`, and metrics by status miss every failure of an
# engine in mid-answer: they count a 200. Catch the base class and read `error.body["error"]["type"]` (of openai,
# `error.type`). A router that still can should answer by status, before the first event, as the fleet does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  anthropic==2.14.0 openai==3.57.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
import anthropic, openai

def event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()

MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
    "stop_sequence": None, "usage": {"input_tokens": 5, "output_tokens": 1},
}
BUSY = {"type": "overloaded_error", "message": "busy"}
CHUNK = {
    "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": "half"}, "finish_reason": None}],
}
message_error, chat_error = event("error", error=BUSY), f"data: {json.dumps({'error': {**BUSY, 'code': 503}})}\n\n".encode()
begun, requests = True, 0

class Failing(http.server.BaseHTTPRequestHandler):
    """Refuses by status where the key says so, else within a stream, behind its first event or in its place."""

    def do_POST(self):
        global requests
        requests += 1
        self.rfile.read(int(self.headers["content-length"]))
        messages = self.path.endswith("/messages")
        first = event("message_start", message=MESSAGE) if messages else f"data: {json.dumps(CHUNK)}\n\n".encode()
        by_status = "status" in str(self.headers["x-api-key"]) + str(self.headers["authorization"])
        self.send_response((529 if messages else 503) if by_status else 200)
        self.send_header("content-type", "application/json" if by_status else "text/event-stream")
        self.end_headers()
        refusal = json.dumps({"type": "error", "error": BUSY}).encode()
        self.wfile.write(refusal if by_status else first * begun + (message_error if messages else chat_error))

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
threading.Thread(target=server.serve_forever, daemon=True).start()
base, messages = f"http://127.0.0.1:{server.server_port}", [{"role": "user", "content": "hi"}]

def by_anthropic(key):
    return anthropic.Anthropic(base_url=base, api_key=key).messages.create(model="m", max_tokens=9, messages=messages, stream=True)

def by_openai(key):
    return openai.OpenAI(base_url=base + "/v1", api_key=key).chat.completions.create(model="m", messages=messages, stream=True)

seen = {}
for name, call in (("anthropic", by_anthropic), ("openai", by_openai)):
    for where, key, begun in (("by status", "status", False), ("in place of the first event", "k", False), ("behind it", "k", True)):
        requests = 0
        try:
            list(call(key))
        except (anthropic.APIError, openai.APIError) as error:
            is_server_error = isinstance(error, (anthropic.InternalServerError, openai.InternalServerError))
            found = (type(error).__name__, getattr(error, "status_code", None), is_server_error, requests)
        seen[name, where] = found
        print(f"{name}, {where}: {found[0]}, status {found[1]}, an InternalServerError: {found[2]}, after {found[3]} requests")
expected = {
    ("anthropic", "by status"): ("OverloadedError", 529, True, 3), ("openai", "by status"): ("InternalServerError", 503, True, 3),
}
for where in ("in place of the first event", "behind it"):
    expected["anthropic", where] = ("APIStatusError", 200, False, 1)
    expected["openai", where] = ("APIError", None, False, 1)
raise SystemExit(0 if seen == expected else 1)
PROGRAM
