#!/bin/sh
# @qwen-code/qwen-code 0.24.4 from npm, a coding agent, with a model server of one's own (`OPENAI_BASE_URL`).
#
# Guess: a question to which the model answers without a tool is one request, whose messages begin with those of the
# request before.
# Seen: after each answer the whole conversation goes to the model a second time, with other instructions in front and
# other tools, to look for things to remember; at the same time as the next question, if that comes quickly.
# For users: the second request shares no block with the first, since they differ from their beginning on. So the cache
# holds each long conversation twice, an answer costs the prefill of another one, and a user counts for two in limits
# of requests. `{"memory": {"enableManagedAutoMemory": false}}` in `~/.qwen/settings.json` ends it
# (docs/getting-started/clients.md).
set -eu
command -v node >/dev/null && command -v npm >/dev/null || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && npm install --silent --no-audit --no-fund --ignore-scripts @qwen-code/qwen-code@0.24.4 >/dev/null) || exit 2
python3 - "$folder" <<'PROGRAM'
import http.server, json, os, pathlib, subprocess, sys, threading, time

folder = pathlib.Path(sys.argv[1])
requests = []

class Serving(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        requests.append(body)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for delta, reason in (({"role": "assistant", "content": "It is so."}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving)
threading.Thread(target=server.serve_forever, daemon=True).start()

def run(name, settings):
    """The requests of a session of three questions, each asked when no request has come for three seconds."""
    home = folder / name
    (home / ".qwen").mkdir(parents=True)
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    url = f"http://127.0.0.1:{server.server_port}/v1"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_API_KEY": "k", "OPENAI_BASE_URL": url, "OPENAI_MODEL": "m"}
    options = ["--auth-type", "openai", "--input-format", "stream-json", "--output-format", "stream-json"]
    requests.clear()
    agent = subprocess.Popen(
        [folder / "node_modules/.bin/qwen", *options], cwd=home, env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    for question in ("first", "second", "third"):
        message = {"role": "user", "content": f"The {question} question?"}
        line = {"type": "user", "session_id": "s", "message": message, "parent_tool_use_id": None}
        agent.stdin.write(json.dumps(line).encode() + b"\n")
        agent.stdin.flush()
        before, deadline = len(requests), time.monotonic() + 60
        while len(requests) == before and time.monotonic() < deadline:
            time.sleep(0.1)
        seen = -1
        while seen != len(requests):
            seen = len(requests)
            time.sleep(3)
    agent.stdin.close()
    agent.wait(60)
    return list(requests)

def counted(name, settings):
    found = run(name, settings)
    for body in found:
        roles = [message["role"] for message in body["messages"]]
        print(f"{name}: {len(body.get('tools', []))} tools, {len(json.dumps(body))} characters, {roles}")
    heads = [json.dumps(body["messages"][0]) for body in found]
    others = [body for body, head in zip(found, heads) if head != heads[0]]
    return len(found), [len(body["messages"]) for body in others]

default = counted("by default", {})
without = counted("without memory", {"memory": {"enableManagedAutoMemory": False}})
# behind the other instructions: the conversation so far, and what to do with it
raise SystemExit(0 if (default, without) == ((6, [4, 6, 8]), (3, [])) else 1)
PROGRAM
