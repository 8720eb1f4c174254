#!/bin/sh
# smg 1.13.0 from PyPI, in front of a server that notes what reaches it.
#
# Guess: `POST /v1/completions` takes every `prompt` that the API of OpenAI names: text, texts, token ids, lists of
# token ids. A router that does not need the text passes it on.
# Seen: token ids are refused by smg itself with status 400, "prompt: data did not match any variant of untagged enum
# StringOrArray"; nothing reaches the server. Text passes, and so do token ids as `input` of `/v1/embeddings`.
# For users: benchmarks with exact lengths, clients that tokenize themselves, and legs that continue an answer by its
# tokens work on vLLM and fail behind the router. The fleet takes all four shapes and counts token ids exactly.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/smg" && "$folder/smg/bin/pip" install -q --disable-pip-version-check smg==1.13.0 || exit 2
"$folder/smg/bin/python" - "$folder" <<'PROGRAM'
import atexit, http.server, json, socket, subprocess, sys, threading, time, urllib.error, urllib.request

class Backend(http.server.BaseHTTPRequestHandler):
    """Two servers that look like vLLM; they note what reaches them."""

    protocol_version = "HTTP/1.1"
    received = []

    def do_GET(self):
        listed = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}]}
        self.answer(200, listed if self.path == "/v1/models" else {"version": "0.33.0"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Backend.received.append((self.path, body, dict(self.headers.items())))
        self.answer(*reply)

    def answer(self, status, body, *headers):
        text = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (*headers, ("content-type", "application/json"), ("content-length", str(len(text)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass

def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]

def post(url, path, body, **headers):
    fields = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), fields)
    try:
        with urllib.request.urlopen(request, timeout=60) as answered:
            return answered.status, answered.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""

def started(*command):
    """The process and the URL of a router over both servers, once it answers."""
    port = free_port()
    workers = [f"http://127.0.0.1:{each.server_port}" for each in servers]
    options = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), "--policy", "round_robin"]
    process = subprocess.Popen(
        list(map(str, [*command, *options, "--worker-urls", *workers])), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    atexit.register(process.terminate)
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        if post(url, "/v1/chat/completions", CHAT)[0] == 200:
            return url
        time.sleep(0.25)
    raise SystemExit(2)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
DONE = (200, {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE]})
reply = DONE
servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Backend) for _ in range(2)]
for each in servers:
    threading.Thread(target=each.serve_forever, daemon=True).start()

url = started(f"{sys.argv[1]}/smg/bin/smg", "launch")
cases = {
    "text": ("/v1/completions", {"prompt": "hi"}), "texts": ("/v1/completions", {"prompt": ["hi", "ho"]}),
    "token ids": ("/v1/completions", {"prompt": [1, 2, 3]}),
    "lists of token ids": ("/v1/completions", {"prompt": [[1, 2], [3]]}),
    "token ids to embed": ("/v1/embeddings", {"input": [1, 2, 3]}),
}
seen = {}
for name, (path, body) in cases.items():
    Backend.received.clear()
    status, answer = post(url, path, {"model": "m", **body})
    seen[name] = bool(Backend.received)
    reached = "reached the server" if seen[name] else f"status {status}, {answer.decode()[:170]}"
    print(f"{name}: {reached}")
refused = ("token ids", "lists of token ids")
raise SystemExit(0 if all(reached == (name not in refused) for name, reached in seen.items()) else 1)
PROGRAM
