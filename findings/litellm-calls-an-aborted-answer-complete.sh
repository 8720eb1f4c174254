#!/bin/sh
# litellm 1.110.2 from PyPI (`hosted_vllm/`, and `openai/`), on a finish reason that vLLM has beside OpenAI's.
#
# Guess: `finish_reason: "abort"`, with which vLLM ends answers that it cut, at its shutdown for one, reaches the
# caller.
# Seen: not streamed it becomes `"stop"`, the reason of a complete answer, with a warning in the log alone; streamed,
# the same answer raises MidStreamFallbackError. The openai client 3.57.0 reports `abort` in both cases.
# For users: behind litellm a cut answer that is not streamed cannot be told from a whole one by any field;
# evaluations and agents go on with half a text. Have the server in front of the engine treat an abort as a failure
# (of the fleet's streams: docs/operate/streams.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  litellm==1.110.2 openai==3.57.0 || exit 2
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
import litellm, openai

litellm.suppress_debug_info = True

reason = ""

class Cutting(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        streamed = json.loads(self.rfile.read(int(self.headers["content-length"]))).get("stream")
        message = {"role": "assistant", "content": "half a sen"}
        choice = {"index": 0, "delta" if streamed else "message": message, "finish_reason": reason}
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        text = json.dumps({"id": "c", "object": kind, "created": 1, "model": "m", "choices": [choice]})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.end_headers()
        self.wfile.write((f"data: {text}\n\ndata: [DONE]\n\n" if streamed else text).encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cutting)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}/v1"
messages = [{"role": "user", "content": "hi"}]

def by_litellm(provider):
    return lambda stream: litellm.completion(
        model=f"{provider}/m", api_base=base, api_key="k", messages=messages, stream=stream
    )

clients = {
    "litellm hosted_vllm/": by_litellm("hosted_vllm"), "litellm openai/": by_litellm("openai"),
    "openai": lambda stream: openai.OpenAI(base_url=base, api_key="k").chat.completions.create(
        model="m", messages=messages, stream=stream
    ),
}
as_described = True
for reason in ("length", "abort"):
    for name, call in clients.items():
        try:
            reasons = [chunk.choices[0].finish_reason for chunk in call(True) if chunk.choices]
            streamed = next(each for each in reasons if each)
        except openai.APIError as error:
            streamed = type(error).__name__
        seen = (call(False).choices[0].finish_reason, streamed)
        print(f"{reason} by {name}: {seen[0]}, streamed {seen[1]}")
        changed = name != "openai" and reason != "length"
        as_described &= seen == (("stop", "MidStreamFallbackError") if changed else (reason, reason))
raise SystemExit(0 if as_described else 1)
PROGRAM
