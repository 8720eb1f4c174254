#!/bin/sh
# vllm-router 0.1.17 from PyPI, in front of a server that notes what reaches it.
#
# Guess: the router forwards the body of a chat as the client sent it; it reads it to choose a server.
# Seen: it reads the body into its own types and writes these. `strict` of a tool is gone, and so is
# `stream_options.continuous_usage_stats`; unknown fields at the top stay. Defaults are added that the client did not
# send: `skip_special_tokens`, `include_reasoning`, `ignore_eos` and more.
# For users: vLLM holds the arguments of a tool to its schema only if the tool says `strict: true`. The same request
# gives valid arguments directly and any JSON behind this router; the log of neither shows why. Compare the bodies on
# both sides of a proxy before comparing answers. The fleet forwards bodies as they came, but for the fields that
# docs/reference/http.md names.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check vllm-router==0.1.17 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
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

url = started(f"{sys.argv[1]}/venv/bin/vllm-router")
function = {"name": "find", "parameters": {"type": "object", "properties": {}}, "strict": True}
sent = CHAT | {"tools": [{"type": "function", "function": function}], "unknown": 1}
sent |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
status, _ = post(url, "/v1/chat/completions", sent)
received = Backend.received[-1][1]
print(f"status {status}; sent:     {json.dumps(sent)}")
print(f"            received: {json.dumps(received)}")
as_described = (
    "strict" not in received["tools"][0]["function"]
    and received["tools"][0]["function"]["name"] == "find"
    and received["stream_options"] == {"include_usage": True}
    and received["unknown"] == 1
    and received["skip_special_tokens"] is True
)
raise SystemExit(0 if as_described else 1)
PROGRAM
