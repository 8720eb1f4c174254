#!/bin/sh
# openai 3.57.0 and anthropic 2.14.0 from PyPI, clients of two APIs that one router serves.
#
# Guess: both wait as long as the server's `retry-after` says, up to a bound of their own, and then try again.
# Seen: at 120 s both wait and try again. At 121 s openai raises RateLimitError at once, without any of its retries;
# anthropic waits the whole time, also for an hour, and twice (its 2 retries), whatever `timeout` the client was given.
# For users: a server that names a true wait of some minutes gets an error from one client at once, and blocks the other
# for as long. The fleet never names more than 60 s (docs/operate/tenants.md, "Retry-After").
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check openai==3.57.0 anthropic==2.14.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading, time

class Refusing(http.server.BaseHTTPRequestHandler):
    wait_s, requests = 0, 0

    def do_POST(self):
        Refusing.requests += 1
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"error": {"message": "later", "type": "rate_limit_error"}}).encode()
        self.send_response(429)
        self.send_header("retry-after", str(Refusing.wait_s))
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
import anthropic, openai

clients = {
    "openai": (openai, lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="k", timeout=5).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}])),
    "anthropic": (anthropic, lambda: anthropic.Anthropic(base_url=url, api_key="k", timeout=5).messages.create(
        model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}])),
}
waits = []
time.sleep = waits.append  # the clients' waits are noted and not slept
seen = {}
for wait_s in (120, 121, 3600):
    for name, (module, call) in clients.items():
        Refusing.wait_s, Refusing.requests = wait_s, 0
        waits.clear()
        try:
            call()
        except module.RateLimitError:
            pass
        seen[name, wait_s] = (Refusing.requests, [round(wait) for wait in waits])
        print(f"{name}, retry-after {wait_s}: {Refusing.requests} requests, waits of {seen[name, wait_s][1]} s")
expected = {
    ("openai", 120): (3, [120, 120]), ("openai", 121): (1, []), ("openai", 3600): (1, []),
    ("anthropic", 120): (3, [120, 120]), ("anthropic", 121): (3, [121, 121]), ("anthropic", 3600): (3, [3600, 3600]),
}
raise SystemExit(0 if seen == expected else 1)
PROGRAM
