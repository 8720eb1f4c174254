#!/bin/sh
# openai-agents 0.24.0 from PyPI (`OpenAIChatCompletionsModel`), with a model that thinks before it calls a tool.
#
# Guess: the thoughts go back with the call, as models that think between calls want it, or they never do.
# Seen: the name of a field decides, and the name of the model. `reasoning` (vLLM) goes back to all models.
# `reasoning_content` (older vLLM, SGLang) goes back only if the model has "deepseek" in its name; under any
# other name it is dropped, also where the server sends both fields. Streamed or not is the same.
# For users: the same weights plan on behind one server and begin again at each call behind another, and the engine's
# blocks of the answer are no hit from the thoughts on. `should_replay_reasoning_content=lambda context: True` of the
# model's class sends them back always.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  openai-agents==0.24.0 openai==3.57.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import asyncio, http.server, json, threading
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
prompts, fields = [], ()

class Thinking(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompts.append(body["messages"])
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
        message = {"role": "assistant", "content": "Fine."}
        if len(prompts) == 1:
            message = {"role": "assistant", "content": None, "tool_calls": [call], **dict.fromkeys(fields, "First the weather.")}
        reason = "tool_calls" if len(prompts) == 1 else "stop"
        streamed = body.get("stream")
        kind, part = ("chat.completion.chunk", "delta") if streamed else ("chat.completion", "message")
        choice = {"index": 0, part: message, "finish_reason": reason}
        text = json.dumps({"id": "c", "object": kind, "created": 1, "model": body["model"], "choices": [choice]})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.end_headers()
        self.wfile.write((f"data: {text}\n\ndata: [DONE]\n\n" if streamed else text).encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Thinking)
threading.Thread(target=server.serve_forever, daemon=True).start()

@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "fine"

async def returned(name, streamed, **options):
    """Whether the thoughts stand in the prompt behind the call of the tool."""
    prompts.clear()
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k")
    agent = Agent(name="a", tools=[weather], model=OpenAIChatCompletionsModel(name, client, **options))
    if streamed:
        async for _ in Runner.run_streamed(agent, "Hi?").stream_events():
            pass
    else:
        await Runner.run(agent, "Hi?")
    assert len(prompts) == 2
    return "First the weather." in json.dumps(prompts[1])

async def main():
    global fields
    as_described = True
    for fields in (("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")):
        for name in ("qwen3-8b", "deepseek-v3"):
            seen = [await returned(name, streamed) for streamed in (False, True)]
            print(f"{' and '.join(fields)} of {name}: returned {seen[0]}, streamed {seen[1]}")
            as_described &= seen == [fields == ("reasoning",) or name == "deepseek-v3"] * 2
    always = await returned("qwen3-8b", False, should_replay_reasoning_content=lambda context: True)
    print(f"of qwen3-8b, if one says so: {always}")
    return as_described and always

raise SystemExit(0 if asyncio.run(main()) else 1)
PROGRAM
