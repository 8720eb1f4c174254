#!/bin/sh
# httpx 0.28.1, aiohttp 3.14.5 and requests 2.34.2 from PyPI, with an address range in NO_PROXY, such as 10.0.0.0/8.
#
# Guess: an address range in NO_PROXY, as kubeadm, OpenShift and Docker write it, is honoured by all of them.
# Seen: requests connects to 10.1.2.3 directly. httpx and aiohttp (with `trust_env=True`) compare names alone, take
# the range for a name, and send the request to the proxy. The single address 10.1.2.3 in the list works in all three.
# For users: calls to engines by pod address leave for the proxy of the company, and fail or succeed slowly from
# there; curl in the same pod goes directly. Pass `trust_env=False` for calls that stay inside the cluster, as the
# fleet does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  httpx==0.28.1 aiohttp==3.14.5 requests==2.34.2 || exit 2
env -u http_proxy -u no_proxy -u ALL_PROXY -u all_proxy "$folder/venv/bin/python" - <<'PROGRAM'
import asyncio, http.server, os, threading
import aiohttp, httpx, requests

class Server(http.server.BaseHTTPRequestHandler):
    """Answers directly and as a proxy; a proxy gets the whole URL as path."""

    def do_GET(self):
        way = b"by the proxy" if self.path.startswith("http://") else b"directly"
        self.send_response(200)
        self.send_header("content-length", str(len(way)))
        self.end_headers()
        self.wfile.write(way)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/health"

async def by_aiohttp():
    async with aiohttp.ClientSession(trust_env=True) as session, session.get(url) as answer:
        return await answer.text()

clients = {
    "requests": lambda: requests.get(url).text, "httpx": lambda: httpx.get(url).text,
    "aiohttp": lambda: asyncio.run(by_aiohttp()),
}
os.environ["HTTP_PROXY"] = os.environ["http_proxy"] = f"http://127.0.0.1:{server.server_port}"
as_described = True
for excepted in ("127.0.0.1", "127.0.0.0/8"):
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = excepted
    for name, call in clients.items():
        way = call()
        print(f"NO_PROXY={excepted}, {name}: {way}")
        proxied = excepted == "127.0.0.0/8" and name != "requests"
        as_described &= way == ("by the proxy" if proxied else "directly")
raise SystemExit(0 if as_described else 1)
PROGRAM
