#!/bin/sh
# @qwen-code/qwen-code 0.24.4 from npm, a coding agent, with a model server of one's own. Takes 3 minutes.
#
# Guess: it waits for the first byte of an answer as long as Node's `fetch` does, 5 minutes, and tries a request four
# times.
# Seen: it leaves after 2 minutes and sends the request again. The tries of its client and its own multiply: a refused
# question comes 28 times within half a minute, each a second after the last one, as `Retry-After: 1` says. 28 more
# follow a minute later, and 28 after two more.
# For users: a queue or a prefill of more than 2 minutes gets the same long prompt again and again, and none of the
# answers is read; a few agents keep a full server full. Set `model.generationConfig.timeout` (milliseconds) in
# `~/.qwen/settings.json` above the longest wait, or have the server send the head of its answer first: then it waits
# (docs/getting-started/clients.md).
set -eu
command -v node >/dev/null && command -v npm >/dev/null || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && npm install --silent --no-audit --no-fund --ignore-scripts @qwen-code/qwen-code@0.24.4 >/dev/null) || exit 2
python3 - "$folder" <<'PROGRAM'
import http.server, json, os, pathlib, select, subprocess, sys, threading, time

folder = pathlib.Path(sys.argv[1])

def refuse(handler):
    text = json.dumps({"error": {"message": "the pool is full", "type": "service_unavailable", "code": "full"}}).encode()
    handler.send_response(503)
    handler.send_header("content-type", "application/json")
    handler.send_header("retry-after", "1")
    handler.end_headers()
    handler.wfile.write(text)

def stay_silent(handler):
    """Returns when the client has left."""
    select.select([handler.connection], [], [], 170)
    handler.close_connection = True

def run(answer, seconds):
    """When the requests of one question came, in seconds, and how long the first one was waited for."""
    came, stayed = [], []

    class Busy(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            began = time.monotonic()
            came.append(began)
            answer(self)
            stayed.append(time.monotonic() - began)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = folder / answer.__name__
    home.mkdir()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_API_KEY": "k", "OPENAI_BASE_URL": url, "OPENAI_MODEL": "m"}
    agent = subprocess.Popen(
        [folder / "node_modules/.bin/qwen", "--auth-type", "openai", "-p", "What is a hash ring?"], cwd=home,
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    agent.kill()
    agent.wait()
    return [each - came[0] for each in came], stayed[:1]

found = {}
runs = [
    threading.Thread(target=lambda: found.update(refused=run(refuse, 110))),
    threading.Thread(target=lambda: found.update(silent=run(stay_silent, 170))),
]
for each in runs:
    each.start()
for each in runs:
    each.join()
refused, (silent, stayed) = found["refused"][0], found["silent"]
early = [each for each in refused if each < 45]
late = [each for each in refused if each >= 45]
print(f"refused with Retry-After: 1: {len(early)} requests in {early[-1]:.0f} s, the next after {late[0] if late else 0:.0f} s")
print(f"silent: left after {stayed[0]:.0f} s, {len(silent)} requests until 170 s")
raise SystemExit(0 if len(early) == 28 and late and 115 < stayed[0] < 125 and len(silent) >= 2 else 1)
PROGRAM
