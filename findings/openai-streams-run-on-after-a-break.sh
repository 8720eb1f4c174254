#!/bin/sh
# openai 3.57.0 and anthropic 2.14.0 from PyPI: a caller that has read enough of a stream and leaves the loop.
#
# Guess: `break` out of `for chunk in client.chat.completions.create(stream=True)` closes the connection, since nothing
# refers to the stream any more; the code that closes it stands in the client for that case.
# Seen: of openai the connection stays open until Python's garbage collector comes by, also after an exception in the
# loop, and with the async client. anthropic closes at once. Within `with` (`async with`) openai does, too.
# For users: an engine sees only a client that reads slowly: it computes the answer to its end, and the request keeps
# its place in every limit. A busy process collects within moments, a script or notebook that waits for a person may not
# for minutes. Write `with client.chat.completions.create(...) as stream:` (docs/getting-started/clients.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  openai==3.57.0 anthropic==2.14.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import asyncio, gc, http.server, json, threading, time
import anthropic, openai

CHUNKS = 30
ends = []

def chats():
    choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    for _ in range(CHUNKS):
        yield f"data: {json.dumps(chunk)}\n\n"

def messages():
    usage = {"input_tokens": 1, "output_tokens": 0}
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "m", "usage": usage}
    events = [{"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None}}]
    events += [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}]
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word "}}
    for event in [*events, *[delta] * CHUNKS]:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

class Slow(http.server.BaseHTTPRequestHandler):
    """Sends ten events a second, and notes which of them was the last that could be sent."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        sent = 0
        try:
            for event in messages() if self.path.endswith("/messages") else chats():
                self.wfile.write(event.encode())
                sent += 1
                time.sleep(0.1)
        except OSError:
            pass
        ends.append(sent)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}"
asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, "stream": True}
by_openai = openai.OpenAI(base_url=base + "/v1", api_key="k")
by_anthropic = anthropic.Anthropic(base_url=base, api_key="k")

def read_some(stream):
    for number, _ in enumerate(stream):
        if number == 3:
            break

def left():
    read_some(by_openai.chat.completions.create(**asked))

def raised():
    for _ in by_openai.chat.completions.create(**asked):
        raise ValueError

async def left_async():
    client = openai.AsyncOpenAI(base_url=base + "/v1", api_key="k")
    async for _ in await client.chat.completions.create(**asked):
        return

def left_with():
    with by_openai.chat.completions.create(**asked) as stream:
        read_some(stream)

def left_anthropic():
    read_some(by_anthropic.messages.create(**asked))

async def wait(call):
    """Runs `call` and then stays for a second, as a program does that waits for its next input."""
    try:
        await call() if asyncio.iscoroutinefunction(call) else call()
    except ValueError:
        pass
    await asyncio.sleep(1)
    after_a_second = bool(ends)
    gc.collect()
    await asyncio.sleep(0.5)
    return "at once" if after_a_second else "at the collection" if ends else "not at all"

seen = {}
calls = {
    "openai, break": left, "openai, exception": raised, "openai, async": left_async, "openai, with": left_with,
    "anthropic, break": left_anthropic,
}
for name, call in calls.items():
    gc.collect()
    gc.disable()
    ends.clear()
    seen[name] = asyncio.run(wait(call))
    print(f"{name}: closed {seen[name]}, {ends} of {CHUNKS} chunks")
    gc.enable()
late = ("openai, break", "openai, exception", "openai, async")
raise SystemExit(0 if seen == {name: "at the collection" if name in late else "at once" for name in calls} else 1)
PROGRAM
