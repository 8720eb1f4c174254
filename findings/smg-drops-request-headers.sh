#!/bin/sh
# smg 1.13.0 from PyPI, in front of a server that notes what reaches it.
#
# Guess: a proxy forwards all headers of a request but those of the connection (RFC 9110, section 7.6.1).
# Seen: a chat arrives with a few that are on a list of its own: `authorization`, `x-request-id`, `traceparent`,
# `tracestate`, `content-type`. `X-Session-ID`, `X-data-parallel-rank`, `baggage`, `user-agent` and every header of a
# user are gone.
# For users: vLLM reads the rank and the session from headers: behind this router ranks are chosen by the engine, its
# KV events have no session, and access logs by tenant or client lose both. Unknown fields of the body do arrive. The
# fleet forwards headers (docs/reference/http.md).
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
sent = {
    "authorization": "Bearer k", "x-request-id": "r", "traceparent": f"00-{'0af7651916cd43dd' * 2}-b7ad6b7169203331-01",
    "tracestate": "a=b", "baggage": "a=b", "user-agent": "agent", "x-session-id": "s", "x-data-parallel-rank": "0",
    "x-tenant": "t",
}
status, _ = post(url, "/v1/chat/completions", CHAT, **sent)
received = {name.lower(): value for name, value in Backend.received[-1][2].items()}
kept = [name for name in sent if received.get(name) == sent[name]]
print(f"status {status}; kept: {kept}; gone: {[name for name in sent if name not in kept]}")
raise SystemExit(0 if kept == ["authorization", "x-request-id", "traceparent", "tracestate"] else 1)
PROGRAM
