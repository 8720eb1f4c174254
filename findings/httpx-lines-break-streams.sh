#!/bin/sh
# httpx 0.28.1 and huggingface_hub 2.4.0 from PyPI, reading the event stream of a chat completion.
#
# Guess: `iter_lines()` ends lines where event streams end them: at LF, CR and CRLF.
# Seen: it also ends them inside of the text, at U+2028, U+2029 and U+0085, as Python's `str.splitlines()` does. JSON
# need not escape these, and engines send them as they are. The event is cut: JSONDecodeError "Unterminated string".
# So it is in huggingface_hub's `InferenceClient` with any server as `base_url`. httpx-sse 0.4.3 and openai 3.57.0
# read the same stream.
# For users: one U+2028 in a prompt's document that the model repeats ends the stream of such a client, always at the
# same token; the server's log shows a client that left. Read with `iter_raw()` or a parser of event streams.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  httpx==0.28.1 httpx-sse==0.4.3 huggingface_hub==2.4.0 openai==3.57.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
import httpx, httpx_sse, huggingface_hub, openai

text = ""

class Streaming(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for delta, finish in (({"role": "assistant", "content": text}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):  # a client that gives up closes the connection
        pass

server = Server(("127.0.0.1", 0), Streaming)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}/v1"
request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

def content(data):
    return json.loads(data)["choices"][0]["delta"].get("content") or ""

def by_lines():
    with httpx.stream("POST", f"{base}/chat/completions", json=request) as answer:
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return "".join(content(each) for each in data if each != "[DONE]")

def by_httpx_sse():
    with httpx.Client() as client, httpx_sse.connect_sse(client, "POST", f"{base}/chat/completions", json=request) as source:
        return "".join(content(event.data) for event in source.iter_sse() if event.data != "[DONE]")

def by_huggingface_hub():
    client = huggingface_hub.InferenceClient(base_url=base, api_key="k")
    return "".join(chunk.choices[0].delta.content or "" for chunk in client.chat_completion(**request, stream=True))

def by_openai():
    client = openai.OpenAI(base_url=base, api_key="k", max_retries=0)
    return "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**request, stream=True))

clients = {"iter_lines": by_lines, "huggingface_hub": by_huggingface_hub, "httpx_sse": by_httpx_sse, "openai": by_openai}
as_described = True
for text in ("plain", "a\u2028b", "a\u2029b", "a\x85b"):
    for name, call in clients.items():
        try:
            seen = "whole" if call() == text else "changed"
        except json.JSONDecodeError as error:
            seen = f"JSONDecodeError: {error.msg}"
        print(f"{ascii(text)} by {name}: {seen}")
        breaks = text != "plain" and name in ("iter_lines", "huggingface_hub")
        as_described &= seen == ("JSONDecodeError: Unterminated string starting at" if breaks else "whole")
raise SystemExit(0 if as_described else 1)
PROGRAM
