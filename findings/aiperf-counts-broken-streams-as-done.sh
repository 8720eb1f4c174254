#!/bin/sh
# aiperf 0.13.0 from PyPI, a load generator, against a server whose every second stream breaks. Installs 1.2 GB.
#
# Guess: a stream that ends with `data: {"error": ...}` and `data: [DONE]`, as vLLM ends the streams of an engine that
# died, is a request that failed. So is one with `finish_reason: "abort"`, by which vLLM ends answers at its shutdown.
# Seen: both are complete requests: 10 of 10, an error rate of 0, nothing in the summary of errors. A connection that
# is reset counts as an error. The broken streams are in all figures, with the few tokens that they have.
# For users: a benchmark in which engines die, or are shut down by an autoscaler or a rollout, reports no failure, and
# shorter answers in less time. Compare `output_sequence_length` with what was requested, and failures with the
# router's (docs/operate/benchmarking.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check aiperf==0.13.0 || exit 2
cd "$folder" && "$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import http.server, json, pathlib, subprocess, sys, threading
from tokenizers import Tokenizer, models, pre_tokenizers

folder = pathlib.Path(sys.argv[1])
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
(folder / "tokenizer").mkdir()
tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
(folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}))
(folder / "prompts.jsonl").write_text("".join(json.dumps({"text": f"word {n}"}) + "\n" for n in range(10)))

class Streaming(http.server.BaseHTTPRequestHandler):
    """Sends ten words; every second stream ends after the third, in a way that the path names."""

    protocol_version = "HTTP/1.1"
    begun = 0

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Streaming.begun += 1
        kind = self.path.split("/")[1]
        breaks = kind if kind != "whole" and Streaming.begun % 2 == 0 else None
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for _ in range(3 if breaks else 10):
            self.event(self.chunk({"content": "word "}, None))
        if breaks == "reset":
            self.close_connection = True
            return self.connection.shutdown(2)
        if breaks == "error":
            error = {"message": "EngineCore encountered an issue", "type": "InternalServerError", "param": None, "code": 500}
            self.event({"error": error})
        else:
            self.event(self.chunk({}, "abort" if breaks == "abort" else "stop"))
        self.piece(b"data: [DONE]\n\n")
        self.piece(b"")

    def chunk(self, delta, finish):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}

    def event(self, data):
        self.piece(f"data: {json.dumps(data)}\n\n".encode())

    def piece(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def do_GET(self):
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
threading.Thread(target=server.serve_forever, daemon=True).start()

def profile(breaks):
    Streaming.begun = 0
    command = [
        folder / "venv/bin/aiperf", "profile", "--model", "m", "--endpoint-type", "chat", "--streaming", "--ui", "none",
        "--url", f"http://127.0.0.1:{server.server_port}/{breaks}", "--tokenizer", folder / "tokenizer",
        "--input-file", folder / "prompts.jsonl", "--custom-dataset-type", "single_turn",
        "--request-count", "10", "--concurrency", "1", "--output-artifact-dir", folder / breaks,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, timeout=600)
    report = json.loads((folder / breaks / "profile_export_aiperf.json").read_text())
    return report["request_count"]["avg"], report.get("request_error_rate", {}).get("avg"), report["output_sequence_length"]["avg"]

seen = {breaks: profile(breaks) for breaks in ("whole", "reset", "error", "abort")}
for breaks, (count, rate, words) in seen.items():
    print(f"{breaks}: {count:g} of 10 requests counted, error rate {rate:g} %, {words:g} tokens an answer")
counted = {breaks: each[:2] for breaks, each in seen.items()}
raise SystemExit(0 if counted == {"whole": (10, 0), "reset": (5, 50), "error": (10, 0), "abort": (10, 0)} else 1)
PROGRAM
