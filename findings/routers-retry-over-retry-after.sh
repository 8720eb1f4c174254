#!/bin/sh
# vllm-router 0.1.17, smg 1.13.0 and openai 3.57.0 from PyPI.
#
# Guess: a 429 or 503 with `Retry-After: 7` goes to the client, which waits 7 s; or the router waits that long. Its
# own retries are for servers that fail.
# Seen: both routers send the request 5 times within half a second, whatever the header says, and then pass the answer
# on. With the two retries of the openai client, which does wait, one call to an overloaded pair of servers becomes 15
# requests.
# For users: engines that shed load (`--max-num-queued-reqs` of vLLM answers 503) are asked five times as often just
# then, and their counters of refusals are five times too high. `--disable-retries` ends it, for dead servers as well.
# The fleet asks each other instance once at most, and leaves the refusing one alone for as long as it said
# (docs/operate/faults.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/vllm-router" && "$folder/vllm-router/bin/pip" install -q --disable-pip-version-check vllm-router==0.1.17 openai==3.57.0 || exit 2
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

import openai

waits = []
seen = {}
for name, command in (("vllm-router", ["vllm-router"]), ("smg", ["smg", "launch"])):
    reply = DONE
    url = started(f"{sys.argv[1]}/{name}/bin/{command[0]}", *command[1:])
    for status in (429, 503):
        reply = (status, {"error": {"message": "later", "type": "overloaded"}}, ("retry-after", "7"))
        Backend.received.clear()
        answered, _ = post(url, "/v1/chat/completions", CHAT)
        seen[name, status, "a request"] = len(Backend.received)
        print(f"{name}: one request became {len(Backend.received)}; the client got {answered}")
    reply = (429, {"error": {"message": "later", "type": "overloaded"}}, ("retry-after", "7"))
    Backend.received.clear()
    slept, time.sleep = time.sleep, waits.append  # the waits of the client are noted and not slept
    try:
        openai.OpenAI(base_url=f"{url}/v1", api_key="k").chat.completions.create(**CHAT)
    except openai.RateLimitError:
        pass
    time.sleep = slept
    seen[name, 429, "a call"] = len(Backend.received)
    print(f"{name}: one call by the openai client became {len(Backend.received)}, with waits of {waits} s in the client")
    waits.clear()
expected = {(name, status, "a request"): 5 for name in ("vllm-router", "smg") for status in (429, 503)}
expected |= {(name, 429, "a call"): 15 for name in ("vllm-router", "smg")}
raise SystemExit(0 if seen == expected else 1)
PROGRAM
