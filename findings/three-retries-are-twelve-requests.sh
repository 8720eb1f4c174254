#!/bin/sh
# llama-index-llms-openai-like 0.8.1 and litellm 1.110.2 from PyPI (both on the openai client), with three retries set,
# against a server that sheds load: 503 with `Retry-After: 1`.
#
# Guess: `max_retries=3` and `num_retries=3` make 4 requests of one call, each a second after the one before, as
# `max_retries=3` of the openai client does.
# Seen: llama-index gives its number to the openai client too and tries that three times: 3 x 4 = 12 requests; 3 is its
# default. litellm adds its own retries to those of the client: 4 + 3 = 7 with `openai/`, of which the last three follow
# within a second, whatever the header says; with `hosted_vllm/` 4, all of them within a second.
# For users: a pool that is full gets several times its load from those that it refused. The name in front of the model
# changes how often. `max_retries=1` of llama-index makes 2 requests, 2 makes 6; in litellm `max_retries` (of the client,
# which waits) takes the place of `num_retries`. A queue in front refuses less (docs/getting-started/clients.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1 litellm==1.110.2 || exit 2
NLTK_DATA="$folder" LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" - 2>"$folder/log" <<'PROGRAM' || { status=$?; cat "$folder/log" >&2; exit $status; }
import http.server, threading, time
import litellm, openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

litellm.suppress_debug_info = True
times = []

class Full(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        times.append(time.monotonic())
        self.send_response(503)
        self.send_header("retry-after", "1")
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "the pool is full", "type": "server_error", "code": 503}}')

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Full)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}/v1"
messages = [{"role": "user", "content": "hi"}]

def by_litellm(provider, **retries):
    return lambda: litellm.completion(f"{provider}/m", messages=messages, api_base=base, api_key="k", **retries)

llama_index = OpenAILike(model="m", api_base=base, api_key="k", is_chat_model=True, max_retries=3)
calls = {
    "openai, max_retries=3": lambda: openai.OpenAI(base_url=base, api_key="k", max_retries=3).chat.completions.create(
        model="m", messages=messages
    ),
    "llama-index, max_retries=3": lambda: llama_index.chat([ChatMessage(role="user", content="hi")]),
    "litellm openai/, num_retries=3": by_litellm("openai", num_retries=3),
    "litellm hosted_vllm/, num_retries=3": by_litellm("hosted_vllm", num_retries=3),
    "litellm openai/, max_retries=3": by_litellm("openai", max_retries=3),
}
seen = {}
for name, call in calls.items():
    times.clear()
    try:
        call()
    except Exception as error:
        raised = type(error).__name__
    early = sum(later - earlier < 0.95 for earlier, later in zip(times, times[1:]))
    seen[name] = (len(times), early)
    print(f"{name}: {len(times)} requests, {early} of them before the second was over; then {raised}")
counts = [count for count, _ in seen.values()]
waited = [early == 0 for _, early in seen.values()]
raise SystemExit(0 if counts == [4, 12, 7, 4, 4] and not waited[2] and not waited[3] and waited[0] and waited[4] else 1)
PROGRAM
