#!/bin/sh
# openai-agents 0.24.0 from PyPI: a caller that leaves `async for event in result.stream_events()`.
#
# Guess: the agent ends there, and calls no tool that the model names later.
# Seen: it goes on in a task of its own: it reads the answer to its end, runs the tools, sends their results to the
# model, and so on until the model calls none; also where nothing refers to the run any more, and Python has collected
# what it can. `result.cancel()` ends it at once, and so does the timeout of a task that is in the loop.
# For users: a page that was left or a `return` at the first sign of trouble does not stop what the agent does to other
# systems, and its requests stay at the engine. Call `cancel()` where the loop is left
# (docs/getting-started/clients.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  openai-agents==0.24.0 openai==3.57.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import asyncio, gc, http.server, json, threading, time
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
asked, restarts = [], []

class Serving(http.server.BaseHTTPRequestHandler):
    """A model that says five words and calls a tool, three times, and then ends."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        asked.append(self.path)
        call = {"index": 0, "id": f"call_{len(asked)}", "type": "function", "function": {"name": "restart", "arguments": "{}"}}
        last = ({"tool_calls": [call]}, "tool_calls") if len(asked) < 4 else ({}, "stop")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for delta, reason in (*[({"role": "assistant", "content": "word "}, None)] * 5, last):
                choice = {"index": 0, "delta": delta, "finish_reason": reason}
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                time.sleep(0.1)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving)
threading.Thread(target=server.serve_forever, daemon=True).start()

@function_tool
def restart() -> str:
    """Restarts a server."""
    restarts.append(time.time())
    return "done"

def started():
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k")
    return Runner.run_streamed(Agent(name="a", tools=[restart], model=OpenAIChatCompletionsModel("m", client)), "Hi?")

async def left(cancels=False):
    """Leaves the loop at the first word."""
    result = started()
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            if cancels:
                result.cancel()
            return

async def timed_out():
    async def read():
        async for _ in started().stream_events():
            pass
    try:
        await asyncio.wait_for(read(), 0.3)
    except asyncio.TimeoutError:
        pass

async def main():
    seen = {}
    for name, leave in {"left": left, "cancelled": lambda: left(cancels=True), "timed out": timed_out}.items():
        asked.clear()
        restarts.clear()
        await leave()
        before = (len(asked), len(restarts))
        gc.collect()
        await asyncio.sleep(5)
        seen[name] = (before, (len(asked), len(restarts)))
        print(f"{name}: {before[0]} requests and {before[1]} calls of the tool, five seconds later {seen[name][1]}")
    return seen

expected = {"left": ((1, 0), (4, 3)), "cancelled": ((1, 0), (1, 0)), "timed out": ((1, 0), (1, 0))}
raise SystemExit(0 if asyncio.run(main()) == expected else 1)
PROGRAM
