#!/bin/sh
# langchain 1.5.2 (langchain-core 1.8.3, langgraph 1.2.24) with langchain-openai 1.7.4 from PyPI: a caller that has read
# enough of a stream and leaves the loop.
#
# Guess: `break` out of `for chunk in chain.stream(...)` ends the call: the connection closes, and the next line runs.
# Seen: so it is with a model and with `prompt | model`. With a parser behind the model, and with an agent
# (`create_agent(...).stream(...)`), the `break` itself waits until the model has said all that it has to say, and the
# next line runs then. The same by `astream` ends at once.
# For users: stop buttons, early exits once the answer is clear, and returns from a view cost the rest of the answer in
# time, and the engine all of its tokens; no server can tell. Use `astream`, or stream from the model itself
# (docs/getting-started/clients.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  langchain==1.5.2 langchain-core==1.8.3 langgraph==1.2.24 langchain-openai==1.7.4 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import asyncio, http.server, json, threading, time
from langchain.agents import create_agent
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

CHUNKS = 30
ends = []

class Slow(http.server.BaseHTTPRequestHandler):
    """Sends ten chunks a second, and notes how many could be sent."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        sent = 0
        try:
            for number in range(CHUNKS):
                delta = {"role": "assistant", "content": "word "}
                choice = {"index": 0, "delta": delta, "finish_reason": "stop" if number == CHUNKS - 1 else None}
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                sent += 1
                time.sleep(0.1)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass
        ends.append(sent)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = ChatOpenAI(model="m", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k", max_retries=0)
prompt = ChatPromptTemplate.from_template("{text}")
chain, agent = prompt | model | StrOutputParser(), create_agent(model, tools=[])
text, asked = {"text": "hi"}, {"messages": [("user", "hi")]}

async def leave_async(stream):
    async for _ in stream:
        break

async def stay(left):
    await left
    while not ends:
        await asyncio.sleep(0.05)

def leave(stream):
    for _ in stream:
        break

calls = {
    "model": lambda: leave(model.stream("hi")),
    "prompt | model": lambda: leave((prompt | model).stream(text)),
    "prompt | model | parser": lambda: leave(chain.stream(text)),
    "agent": lambda: leave(agent.stream(asked, stream_mode="messages")),
    "prompt | model | parser, astream": lambda: asyncio.run(stay(leave_async(chain.astream(text)))),
    "agent, astream": lambda: asyncio.run(stay(leave_async(agent.astream(asked, stream_mode="messages")))),
}
whole = set()
for name, call in calls.items():
    ends.clear()
    began = time.monotonic()
    call()
    took = time.monotonic() - began
    while not ends:
        time.sleep(0.05)
    print(f"{name}: the loop was left after {took:.1f} s, and {ends[0]} of {CHUNKS} chunks were sent")
    if ends[0] == CHUNKS:
        whole.add(name)
raise SystemExit(0 if whole == {"prompt | model | parser", "agent"} else 1)
PROGRAM
