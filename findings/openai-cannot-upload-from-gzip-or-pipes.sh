#!/bin/sh
# openai 3.57.0 from PyPI: uploads of input files for batches, to a server that counts lines.
#
# Guess: `files.create` takes whatever can be read: a file that `gzip.open` unpacks, or the pipe of another program;
# where it cannot know the length, it sends pieces.
# Seen: the length is what the operating system says of the file below: the packed bytes, or 0 for a pipe. The server
# is promised 401 bytes where 19,280 follow, and the call raises "Too much data for declared Content-Length", a
# `LocalProtocolError` of h11 that `except openai.APIError` does not catch and no retry repeats.
# For users: scripts that keep batches packed fail at the upload, and the server sees a form that breaks off. Unpack
# first, to a file or into memory (`gzip.open(path).read()`).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check openai==3.57.0 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import gzip, http.server, json, pathlib, subprocess, sys, threading
import openai

folder = pathlib.Path(sys.argv[1])
text = b'{"custom_id": "1"}\n' * 1000
(folder / "lines.jsonl").write_bytes(text)
with gzip.open(folder / "lines.jsonl.gz", "wb") as packed:
    packed.write(text)

class Keeping(http.server.BaseHTTPRequestHandler):
    """Says how many of the lines arrived, and with which length they were announced."""

    announced = []

    def do_POST(self):
        length = int(self.headers["content-length"])
        Keeping.announced.append(length)
        body = self.rfile.read(length)
        file = {"id": "file-1", "object": "file", "bytes": body.count(b"custom_id"), "created_at": 1, "filename": "f", "purpose": "batch"}
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({**file, "status": "processed"}).encode())

    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):  # a client that gives up closes the connection
        pass

server = Server(("127.0.0.1", 0), Keeping)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k")

def piped():
    return subprocess.Popen(["cat", folder / "lines.jsonl"], stdout=subprocess.PIPE).stdout

sources = {
    "a file": lambda: (folder / "lines.jsonl").open("rb"),
    "gzip.open, read": lambda: gzip.open(folder / "lines.jsonl.gz").read(),
    "gzip.open": lambda: gzip.open(folder / "lines.jsonl.gz"),
    "a pipe": piped,
}
seen = {}
for name, source in sources.items():
    try:
        seen[name] = f"{client.files.create(file=('lines.jsonl', source()), purpose='batch').bytes} lines"
    except Exception as error:
        seen[name] = f"{type(error).__module__.split('.')[0]}.{type(error).__name__}"
        if isinstance(error, openai.APIError):
            seen[name] += ", an error of the client's own"
    print(f"{name}, {len(text)} bytes: {seen[name]}; announced {Keeping.announced[-1:]}")
whole = "1000 lines"
raise SystemExit(0 if list(seen.values()) == [whole, whole, "h11.LocalProtocolError", "h11.LocalProtocolError"] else 1)
PROGRAM
