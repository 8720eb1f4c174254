#!/bin/sh
# requests 2.34.2, httpx 0.28.1, aiohttp 3.14.5 and openai 3.57.0 from PyPI, undici 6.21.1 (Node's `fetch`) from npm.
#
# Guess: an interim answer (100 Continue, 102 Processing, 103 Early Hints) in front of the real one is skipped by
# every client, as RFC 9110, section 15.2 asks of them; so a router can send them while a request waits in its queue.
# Seen: httpx, aiohttp and openai skip all three. requests, on Python's http.client, takes 102 and 103 as the answer
# itself: no exception, status 102, `ok` is true and the body is empty. undici skips 102 and 103, but ends a request
# that sent no `Expect` at a 100: "SocketError: bad response".
# For users: no interim status is safe for all clients. A router keeps a waiting request alive with the headers of its
# answer and comments in the stream, or not at all; a proxy that turns early hints on breaks clients that use
# requests.
set -eu
command -v node >/dev/null && command -v npm >/dev/null || exit 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  requests==2.34.2 httpx==0.28.1 aiohttp==3.14.5 openai==3.57.0 || exit 2
(cd "$folder" && npm install --silent --no-audit --no-fund undici@6.21.1 >/dev/null) || exit 2
cat > "$folder/post.js" <<'PROGRAM'
require('undici').fetch(process.argv[2], {method: 'POST', body: '{}'})
  .then(async answer => console.log(answer.status, (await answer.text()).length > 0 ? 'body' : 'empty'))
  .catch(error => console.log('refused:', error.cause?.message))
PROGRAM
"$folder/venv/bin/python" - "$folder/post.js" <<'PROGRAM'
import asyncio, re, socket, subprocess, sys, threading
import aiohttp, httpx, openai, requests

BODY = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'
)
interim = b""

def answer(connection):
    with connection:
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        head, body = received.split(b"\r\n\r\n", 1)
        length = re.search(rb"content-length: (\d+)", head.lower())
        while length and len(body) < int(length[1]):
            body += connection.recv(65536)
        connection.sendall(interim)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
        )
        while connection.recv(65536):
            pass

def serve(listener):
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
base = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
url = f"{base}/chat/completions"

def shown(status, text):
    return f"{status} {'body' if text else 'empty'}"

def by_requests():
    reply = requests.post(url, json={}, timeout=20)
    return shown(reply.status_code, reply.text)

def by_httpx():
    reply = httpx.post(url, json={}, timeout=20)
    return shown(reply.status_code, reply.text)

async def by_aiohttp():
    async with aiohttp.ClientSession() as session, session.post(url, json={}) as reply:
        return shown(reply.status, await reply.text())

def by_openai():
    client = openai.OpenAI(base_url=base, api_key="k", max_retries=0, timeout=20)
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    return shown(200, reply.choices[0].message.content)

def by_undici():
    return subprocess.run(["node", sys.argv[1], url], capture_output=True, text=True, timeout=30).stdout.strip()

clients = {
    "requests": by_requests, "httpx": by_httpx, "aiohttp": lambda: asyncio.run(by_aiohttp()), "openai": by_openai,
    "undici": by_undici,
}
surprises = {("requests", 102): "102 empty", ("requests", 103): "103 empty", ("undici", 100): "refused: bad response"}
as_described = True
for status, reason in ((100, "Continue"), (102, "Processing"), (103, "Early Hints")):
    interim = f"HTTP/1.1 {status} {reason}\r\n\r\n".encode()
    for name, call in clients.items():
        seen = call()
        print(f"{status} in front of the answer, {name}: {seen}")
        as_described &= seen == surprises.get((name, status), "200 body")
raise SystemExit(0 if as_described else 1)
PROGRAM
