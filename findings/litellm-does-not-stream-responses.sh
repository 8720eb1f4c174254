#!/bin/sh
# litellm 1.110.2 from PyPI: `litellm.responses(..., stream=True)` (`openai/`, `hosted_vllm/`) for a model of one's own.
#
# Guess: the server gets `"stream": true`, and the caller its events as they come, as with `litellm.completion`.
# Seen: for a model whose name is not in litellm's list of prices the field is not sent. litellm waits for the whole
# answer and then makes events of it; the last is always `response.completed`, also around a response whose status is
# `failed` or `incomplete`. With the name `gpt-4o`, for the same server, it streams, and a failure raises.
# For users: behind litellm the time to the first token of every response is its whole time, a router sees no stream
# that it could continue and clients that leave at their timeout, and a failed answer ends like a good one. Register
# the name (`litellm.register_model({"NAME": {"litellm_provider": "openai", "supports_native_streaming": True}})`).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check litellm==1.110.2 || exit 2
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, threading
import litellm

litellm.suppress_debug_info = True

RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "parallel_tool_calls": True, "tool_choice": "auto",
    "tools": [], "error": None, "incomplete_details": None, "instructions": None, "metadata": None, "temperature": 1.0,
    "top_p": 1.0,
}
HALF = {
    "id": "msg_1", "type": "message", "role": "assistant", "status": "incomplete",
    "content": [{"type": "output_text", "text": "half a sen", "annotations": []}],
}

class Responses(http.server.BaseHTTPRequestHandler):
    """Ends every response with a status, streamed where the request says so."""

    status, streamed = "", None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Responses.streamed = body.get("stream")
        error = {"code": "server_error", "message": "the engine died"} if Responses.status == "failed" else None
        response = {**RESPONSE, "status": Responses.status, "output": [HALF], "error": error}
        event = f"response.{Responses.status}"
        text = json.dumps(response)
        if Responses.streamed:
            text = f"event: {event}\ndata: {json.dumps({'type': event, 'sequence_number': 0, 'response': response})}\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if Responses.streamed else "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Responses)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}/v1"

def last_event(model):
    try:
        events = list(litellm.responses(model=model, input="hi", api_base=base, api_key="k", stream=True))
    except Exception as error:
        return type(error).__name__
    return getattr(events[-1].type, "value", events[-1].type)

as_described = True
for model, streams in (("openai/my-model", False), ("hosted_vllm/my-model", False), ("openai/gpt-4o", True)):
    for status in ("completed", "incomplete", "failed"):
        Responses.status = status
        last = last_event(model)
        print(f"{model}, {status}: `stream` sent {bool(Responses.streamed)}, the end is {last}")
        expected = {"failed": "MidStreamFallbackError"}.get(status, f"response.{status}") if streams else "response.completed"
        as_described &= (bool(Responses.streamed), last) == (streams, expected)
litellm.register_model({"my-model": {"litellm_provider": "openai", "supports_native_streaming": True}})
Responses.status = "completed"
last_event("openai/my-model")
print(f"openai/my-model, registered: `stream` sent {bool(Responses.streamed)}")
raise SystemExit(0 if as_described and Responses.streamed else 1)
PROGRAM
