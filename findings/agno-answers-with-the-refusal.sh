#!/bin/sh
# agno 3.1.10 from PyPI, an agent whose model server refuses a request.
#
# Guess: `agent.run(...)` raises, as the openai client below it does.
# Seen: it returns. `content` is the message of the server's error, as if the model had said it; only `status` is
# `ERROR`. Streamed, the message comes as an event of its own kind.
# With the Responses API streamed, a failure is not seen at all: after `error`, after `response.failed`, and where the
# connection ends, the half text is the content and the status is `COMPLETED`.
# For users: "the pool is full" is shown to people, stored and graded as an answer, and no exception reaches the code
# that would try again. Compare `status` after each run, and do not stream responses whose end matters
# (docs/getting-started/clients.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check agno==3.1.10 openai==2.54.0 || exit 2
"$folder/venv/bin/python" - 2>"$folder/log" <<'PROGRAM' || { status=$?; cat "$folder/log" >&2; exit $status; }
import http.server, json, threading
from agno.agent import Agent
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike

def event(kind, number, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n".encode()

RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "parallel_tool_calls": True, "tool_choice": "auto",
    "tools": [], "error": None, "incomplete_details": None, "instructions": None, "metadata": None, "temperature": 1.0,
    "top_p": 1.0, "output": [],
}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
PLACE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
BEGIN = (
    event("response.created", 0, response={**RESPONSE, "status": "in_progress"})
    + event("response.output_item.added", 1, output_index=0, item=MESSAGE)
    + event("response.content_part.added", 2, **PLACE, part={"type": "output_text", "text": "", "annotations": []})
    + event("response.output_text.delta", 3, **PLACE, delta="half a sen", logprobs=[])
)
FAILURE = {"code": "server_error", "message": "the engine died"}
ends = {
    "error": event("error", 4, **FAILURE, param=None),
    "response.failed": event("response.failed", 4, response={**RESPONSE, "status": "failed", "error": FAILURE}),
    "the end of the connection": b"",
}
end = b""

class Failing(http.server.BaseHTTPRequestHandler):
    """Refuses chats, and breaks off responses."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        chat = "chat" in self.path
        self.send_response(503 if chat else 200)
        self.send_header("content-type", "application/json" if chat else "text/event-stream")
        self.send_header("x-should-retry", "false")
        self.end_headers()
        refusal = {"error": {"message": "the pool is full", "type": "server_error", "code": 503}}
        self.wfile.write(json.dumps(refusal).encode() if chat else BEGIN + end)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}/v1"

run = Agent(model=OpenAILike(id="m", base_url=base, api_key="k"), telemetry=False).run("hi")
print(f"a chat that was refused: content {run.content!r}, status {run.status.value}")
as_described = (run.content, run.status.value) == ("the pool is full", "ERROR")
for name, end in ends.items():
    agent = Agent(model=OpenAIResponses(id="m", base_url=base, api_key="k"), telemetry=False)
    run = list(agent.run("hi", stream=True, yield_run_output=True))[-1]
    print(f"a streamed response, then {name}: content {run.content!r}, status {run.status.value}")
    as_described &= (run.content, run.status.value) == ("half a sen", "COMPLETED")
raise SystemExit(0 if as_described else 1)
PROGRAM
