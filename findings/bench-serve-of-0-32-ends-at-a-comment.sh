#!/bin/sh
# vllm 0.32.0 and 0.33.0 from PyPI: `vllm bench serve`, on a comment in the event stream. Fetches wheels of 500 MB.
#
# Guess: a comment (a line that begins with a colon), by which proxies keep idle streams alive, is skipped; the code of
# the benchmark says so.
# Seen: up to 0.32 a comment that arrives by itself hides all that follows: each read loses the white space at its end,
# so the comment has no end either, and every event becomes a part of it. In front of the first event the request fails
# ("Never received a valid chunk to calculate TTFT"); in the middle it counts as a success, with the text so far and
# without the server's count of tokens. 0.33 skips comments, and no longer takes the chunk with the role for a token.
# For users: against a server or proxy that sends comments, and only while it is slow, the benchmark reports failures,
# or short answers as successes. Take 0.33, or blank lines for comments, which both versions read; and compare times
# to the first token of one version only. The fleet sends comments where docs/operate/streams.md says so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  aiohttp==3.14.5 regex==2026.9.29 tqdm==4.70.0 || exit 2
for version in 0.32.0 0.33.0; do
  "$folder/venv/bin/pip" download -q --disable-pip-version-check --no-deps --only-binary :all: -d "$folder/$version" vllm==$version || exit 2
done
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import asyncio, http.server, importlib.util, json, pathlib, sys, threading, time, zipfile
import aiohttp

CODE = "vllm/benchmarks/lib/endpoint_request_func.py"

def requests_of(version):
    """The module of the wheel that sends the benchmark's requests; it imports nothing of vllm."""
    folder = pathlib.Path(sys.argv[1], version)
    zipfile.ZipFile(next(folder.glob("*.whl"))).extract(CODE, folder)
    name = "requests_" + version.replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, folder / CODE)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def chunk(delta, reason=None):
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

def events(*chunks):
    return [f"data: {json.dumps(each)}\n\n".encode() for each in chunks]

USAGE = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [],
         "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}
first = events(chunk({"role": "assistant", "content": ""}), chunk({"content": "one"}))
rest = events(chunk({"content": " two"}), chunk({"content": " three"}, "stop"), USAGE) + [b"data: [DONE]\n\n"]
streams = {
    "no comment": [*first, *rest], "a comment first": [b": waiting\n\n", *first, *rest],
    "a comment within": [*first, b": waiting\n\n", *rest], "a blank line first": [b"\n", *first, *rest],
}
stream = []

class Streaming(http.server.BaseHTTPRequestHandler):
    """Each part is a read of its own at the client."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for part in stream:
            time.sleep(0.1)
            self.wfile.write(part)
            self.wfile.flush()

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
threading.Thread(target=server.serve_forever, daemon=True).start()

async def measured(module):
    url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        sent = module.RequestFuncInput(prompt="hi", api_url=url, prompt_len=5, output_len=3, model="m")
        return await module.async_request_openai_chat_completions(sent, session)

seen = {}
for version in ("0.32.0", "0.33.0"):
    module = requests_of(version)
    for name, stream in streams.items():
        found = asyncio.run(measured(module))
        seen[version, name] = (found.success, found.generated_text, found.output_tokens)
        print(f"{version}, {name}: success {found.success}, {found.generated_text!r}, {found.output_tokens} tokens, "
              f"first after {found.ttft:.1f} s {found.error}")
whole = (True, "one two three", 3)
expected = dict.fromkeys(seen, whole) | {("0.32.0", "a comment first"): (False, "", 0), ("0.32.0", "a comment within"): (True, "one", 0)}
raise SystemExit(0 if seen == expected else 1)
PROGRAM
