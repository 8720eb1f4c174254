#!/bin/sh
# inspect-ai 0.3.285 with openai 3.57.0 from PyPI, in batch mode, against a server that speaks OpenAI's Batch API.
#
# Guess: where the server refuses one request of a batch, all other samples get their answers, and that one gets the
# server's error, as without `batch`.
# Seen: all samples of the batch fail, and no answer is used. A refusal stands in the file of errors as OpenAI writes
# it: `error` is null, and the `response` has a status code and `body: {"error": ...}`. The client reads that body as
# a chat completion, and the ValidationError ends the reading of both files. So does a request whose window was over
# (`error: {"code": "batch_expired"}`): the code is taken for an HTTP status.
# For users: one prompt that is too long, or an hour too few, costs an evaluation the answers of a whole batch, which
# were computed and lie in the file of answers; the server's log shows a batch that is complete. Limit prompts
# beforehand, or evaluate without `batch`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  inspect-ai==0.3.285 openai==3.57.0 || exit 2
INSPECT_LOG_DIR="$folder/logs" "$folder/venv/bin/python" - <<'PROGRAM'
import http.server, json, re, threading

lines = []

def outcome(line):
    return next((each for each in ("refused", "expired") if each in json.dumps(line["body"])), "answered")

def result(line):
    """A line of the two files, as OpenAI writes it."""
    kind, status, body, error = outcome(line), 200, None, None
    if kind == "answered":
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "logprobs": None, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    elif kind == "refused":
        error = {"message": "the prompt is too long", "type": "invalid_request_error", "param": "messages"}
        status, body, error = 400, {"error": {**error, "code": "context_length_exceeded"}}, None
    else:
        error = {"code": "batch_expired", "message": "this request could not be run before the window was over"}
    response = None if error else {"status_code": status, "request_id": "r", "body": body}
    return json.dumps({"id": "b", "custom_id": line["custom_id"], "response": response, "error": error})

class Serving(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("/files"):
            lines[:] = [json.loads(each) for each in re.findall(rb"^\{.*\}\r?$", body, re.M)]
            self.answer({"id": "file-in", "object": "file", "bytes": 1, "created_at": 1, "filename": "f", "purpose": "batch", "status": "processed"})
        else:
            self.answer(self.batch())

    def do_GET(self):
        if self.path.endswith("/content"):
            text = "\n".join(result(each) for each in lines if (outcome(each) != "answered") == ("errors" in self.path))
            self.answer(text.encode())
        else:
            self.answer(self.batch())

    def batch(self):
        outcomes = list(map(outcome, lines))
        failed = len(lines) - outcomes.count("answered")
        counts = {"total": len(lines), "completed": len(lines) - failed, "failed": failed}
        return {
            "id": "batch", "object": "batch", "endpoint": "/v1/chat/completions", "input_file_id": "file-in",
            "completion_window": "24h", "status": "expired" if "expired" in outcomes else "completed", "created_at": 1,
            "request_counts": counts, "output_file_id": "file-out", "error_file_id": "file-errors" if failed else None,
        }

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *_):
        pass

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import BatchConfig, get_model
from inspect_ai.solver import generate

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = get_model("openai/m", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k", responses_api=False, memoize=False)

def run(*prompts):
    task = Task(dataset=[Sample(input=each) for each in prompts], solver=generate())
    config = BatchConfig(size=len(prompts), send_delay=5, tick=0.2)
    log = eval(task, model=model, batch=config, display="none", log_samples=True, fail_on_error=False, log_format="json")[0]
    return [each.error.message.split("\n")[0] if each.error else each.output.completion for each in log.samples]

seen = {name: run("answered", name) for name in ("answered", "refused", "expired")}
for name, ends in seen.items():
    print(f"one answered, one {name}: {ends}")
expected = {"answered": "yes", "refused": "validation errors for ChatCompletion", "expired": "not supported between instances"}
raise SystemExit(0 if all(all(expected[name] in each for each in ends) for name, ends in seen.items()) else 1)
PROGRAM
