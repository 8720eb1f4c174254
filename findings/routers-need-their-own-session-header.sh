#!/bin/sh
# vllm-router 0.1.17 (`consistent_hash`, `sticky_least_loaded`) and smg 1.13.0 (`consistent_hashing`, `manual`) from
# PyPI, before two servers.
#
# Guess: a policy by session hashes the header that names one, and otherwise something of the request (its prompt, its
# `user`), so that requests spread; the headers in use (`X-Session-ID`, `x-claude-code-session-id`) are known.
# Seen: at vllm-router all requests without `X-Session-ID` or `X-User-ID` are one session: 40 requests with different
# prompts, `user` and keys go to one server, and the other one idles. smg knows `X-SMG-Routing-Key` alone: without
# that, also with one and the same `X-Session-ID`, it draws a server at random.
# For users: the same clients behind the two routers have all of their load on one engine, or none of their caches,
# with no line in a log. Check by counting requests per engine; at smg set `--routing-key-headers x-session-id`. The
# fleet places by the content of prompts and needs no header.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/vllm-router" && "$folder/vllm-router/bin/pip" install -q --disable-pip-version-check vllm-router==0.1.17 || exit 2
python3 -m venv "$folder/smg" && "$folder/smg/bin/pip" install -q --disable-pip-version-check smg==1.13.0 || exit 2
"$folder/vllm-router/bin/python" - "$folder" <<'PROGRAM'
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

def started(policy, *command):
    """The process and the URL of a router over both servers, once it answers."""
    port = free_port()
    workers = [f"http://127.0.0.1:{each.server_port}" for each in servers]
    options = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), "--policy", policy]
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

def shares(url, headers_of):
    """The requests that each server got, the larger number first."""
    before = dict(counted)
    for number in range(40):
        different = {"messages": [{"role": "user", "content": f"{number * 7919} words"}], "user": f"user-{number}"}
        post(url, "/v1/chat/completions", CHAT | different, **headers_of(number))
    return sorted((counted[port] - before[port] for port in counted), reverse=True)

class Counting(Backend):
    def do_POST(self):
        if self.path == "/v1/chat/completions":
            counted[self.server.server_port] += 1
        super().do_POST()

counted = {}
for each in servers:
    each.RequestHandlerClass = Counting
    counted[each.server_port] = 0
cases = {
    "no header": lambda number: {},
    "one X-Session-ID": lambda number: {"X-Session-ID": "one"},
    "40 X-Session-ID": lambda number: {"X-Session-ID": f"session-{number * 7919}"},
    "one X-SMG-Routing-Key": lambda number: {"X-SMG-Routing-Key": "one"},
}
seen = {}
for name, policies in (("vllm-router", ("consistent_hash", "sticky_least_loaded")), ("smg", ("consistent_hashing", "manual"))):
    command = [f"{sys.argv[1]}/{name}/bin/{name}", *(["launch"] if name == "smg" else [])]
    for policy in policies:
        url = started(policy, *command)
        for case, headers_of in cases.items():
            found = shares(url, headers_of)
            seen[name, policy, case] = "one server" if found == [40, 0] else "both"
            print(f"{name}, {policy}, {case}: {found}")
one = {"vllm-router": ("no header", "one X-Session-ID", "one X-SMG-Routing-Key"), "smg": ("one X-SMG-Routing-Key",)}
raise SystemExit(0 if all((found == "one server") == (case in one[name]) for (name, _, case), found in seen.items()) else 1)
PROGRAM
