#!/bin/sh
# langchain-openai 1.7.4 (with langchain-core 1.8.3) from PyPI, on vLLM's `stream_options.continuous_usage_stats`.
#
# Guess: `usage` in every chunk is a running total, as vLLM documents it, and the client reports the last one.
# Seen: the client adds all of them up. An answer of 2 tokens to a prompt of 100 in 4 chunks with usage is reported as
# 400 prompt tokens and 5 completion tokens; a long answer as millions. The openai client leaves the choice to its
# caller.
# For users: running usage must not reach such a client unless it asked. A proxy that adds `continuous_usage_stats`,
# to meter cut streams, has to take the usage out of every chunk but the last. The fleet asks for the last chunk's
# usage only.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  langchain-openai==1.7.4 langchain-core==1.8.3 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
from langchain_openai import ChatOpenAI

running = False

class Streaming(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        deltas = [({"role": "assistant", "content": ""}, None), ({"content": "h"}, None), ({"content": "i"}, "stop")]
        for tokens, (delta, finish) in enumerate(deltas):
            self.send([{"index": 0, "delta": delta, "finish_reason": finish}], tokens if running else None)
        self.send([], 2)
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, choices, tokens):
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
        if tokens is not None:
            chunk["usage"] = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = ChatOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k", model="m", stream_usage=True)
seen = {}
for running in (False, True):
    chunks = list(model.stream("hi"))
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    usage = message.usage_metadata
    seen[running] = (usage["input_tokens"], usage["output_tokens"])
    print(f"usage in {'every chunk' if running else 'the last chunk'}: {seen[running]} tokens of the prompt and of the answer")
raise SystemExit(0 if seen == {False: (100, 2), True: (400, 5)} else 1)
PROGRAM
