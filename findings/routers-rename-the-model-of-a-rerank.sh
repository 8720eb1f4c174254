#!/bin/sh
# vllm-router 0.1.17 and smg 1.13.0 from PyPI, in front of a server that notes what reaches it.
#
# Guess: `POST /v1/rerank` reaches vLLM as it was sent, like a chat.
# Seen: both routers exchange the name of the model: vllm-router sends `default`, smg `unknown`. Both drop
# `truncate_prompt_tokens` and add SGLang fields (`return_documents`, `rid`).
# For users: a vLLM server that serves the model under its own name answers 404, "The model `default` does not exist",
# to a request that names it right, while a check of the server itself passes. A way around it is `--served-model-name
# m default unknown`. The fleet forwards the body.
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

reranked = {"model": "m", "query": "q", "documents": ["a", "b"], "top_n": 1, "truncate_prompt_tokens": 100}
seen = {}
for name, command in (("vllm-router", ["vllm-router"]), ("smg", ["smg", "launch"])):
    reply = DONE
    url = started(f"{sys.argv[1]}/{name}/bin/{command[0]}", *command[1:])
    reply = (200, {"id": "r", "model": "m", "results": [{"index": 0, "relevance_score": 0.5, "document": {"text": "a"}}]})
    Backend.received.clear()
    post(url, "/v1/rerank", reranked)
    path, received, _ = Backend.received[0]
    seen[name] = received["model"]
    print(f"{name}: {path} {json.dumps(received)}")
    if "truncate_prompt_tokens" in received:
        raise SystemExit(1)
raise SystemExit(0 if seen == {"vllm-router": "default", "smg": "unknown"} else 1)
PROGRAM
