#!/bin/sh
# openai 3.57.0 and anthropic 2.14.0 from PyPI: a stream was requested, and the answer is one JSON object under status 200.
#
# Guess: the client raises, since the content type is no event stream, or gives the one object.
# Seen: both give a stream without any chunk and without an exception, also where the object is `{"error": ...}`. Their
# helpers that gather a stream (`.stream(...)`) raise an AssertionError without a text.
# For users: a cache, a filter or a proxy that answers streams in one piece, or an error under 200, looks like a model that
# said nothing: callers store empty answers, and no status, log or retry shows it. Answer a stream as a stream, and
# errors before its first byte by their status.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  openai==3.57.0 anthropic==2.14.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
import anthropic, openai

body = {}

class Answering(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
anthropic_client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

def by_openai():
    return len(list(openai_client.chat.completions.create(**request, stream=True)))

def by_openai_helper():
    with openai_client.chat.completions.stream(**request) as stream:
        return stream.get_final_completion()

def by_anthropic():
    return len(list(anthropic_client.messages.create(**request, max_tokens=5, stream=True)))

def by_anthropic_helper():
    with anthropic_client.messages.stream(**request, max_tokens=5) as stream:
        return stream.get_final_message()

choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
completion = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
message = {
    "id": "m", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
}
error = {"type": "error", "error": {"type": "api_error", "message": "out of memory"}}
as_described = True
for call, whole in (
    (by_openai, completion), (by_openai_helper, completion), (by_anthropic, message), (by_anthropic_helper, message)
):
    for label, body in (("an answer", whole), ("an error", error)):
        try:
            seen = f"{call()} chunks"
        except AssertionError as failure:
            seen = f"AssertionError {str(failure)!r}"
        print(f"{call.__name__}, {label}: {seen}")
        as_described &= seen == ("AssertionError ''" if call.__name__.endswith("helper") else "0 chunks")
raise SystemExit(0 if as_described else 1)
PROGRAM
