#!/bin/sh
# semantic-kernel 1.45.0 and crewai 1.15.30 from PyPI, on the second turn of an agent.
#
# Guess: a model that writes text and calls a tool in one answer gets both back in the next request, as pydantic-ai
# 2.68.0 and openai-agents 0.24.0 send them.
# Seen: both frameworks send the call alone; the text is gone, in this and in all later turns.
# For users: a model that plans aloud ("First the weather, then a hotel.") loses its plan at each call, and the engine's
# blocks of the answer are no hit from the first word of that text on: hit forecasts of "last prompt and answer" are too
# high for such agents by the whole answer. Compare two consecutive bodies before judging a cache.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/kernel" && "$folder/kernel/bin/pip" install -q --disable-pip-version-check semantic-kernel==1.45.0 openai==3.57.0 || exit 2
python3 -m venv "$folder/crew" && "$folder/crew/bin/pip" install -q --disable-pip-version-check crewai==1.15.30 || exit 2
cat > "$folder/agent.py" <<'PROGRAM'
import asyncio, http.server, json, sys, threading

TEXT = "First the weather, then a hotel."
bodies = []

class Planning(http.server.BaseHTTPRequestHandler):
    """Answers the first request with text and a call of its first tool, others with text."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bodies.append(body)
        message, reason = {"role": "assistant", "content": "Sun."}, "stop"
        if len(bodies) == 1:
            function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"city": "Oslo"}'}
            call = {"id": "call_1", "type": "function", "function": function}
            message, reason = {"role": "assistant", "content": TEXT, "tool_calls": [call]}, "tool_calls"
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Planning)
threading.Thread(target=server.serve_forever, daemon=True).start()
base = f"http://127.0.0.1:{server.server_port}/v1"

def weather(city: str) -> str:
    """The weather in a city."""
    return "sun"

def by_kernel():
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Tools:
        weather = staticmethod(kernel_function(description="The weather in a city.")(weather))

    service = OpenAIChatCompletion(ai_model_id="m", async_client=AsyncOpenAI(base_url=base, api_key="k"))
    asyncio.run(ChatCompletionAgent(service=service, name="a", plugins=[Tools()]).get_response(messages="Plan a trip."))

def by_crew():
    from crewai import LLM, Agent
    from crewai.tools import tool

    model = LLM(model="openai/m", base_url=base, api_key="k")
    Agent(role="planner", goal="plan", backstory="none", llm=model, tools=[tool("weather")(weather)]).kickoff("Plan a trip.")

{"semantic-kernel": by_kernel, "crewai": by_crew}[sys.argv[1]]()
back = next(each for each in bodies[1]["messages"] if each["role"] == "assistant")
print(f"{sys.argv[1]}: the model wrote {TEXT!r} and a call; back come {back.get('content')!r} and {len(back['tool_calls'])} call")
raise SystemExit(0 if not back.get("content") and len(back["tool_calls"]) == 1 else 1)
PROGRAM
"$folder/kernel/bin/python" "$folder/agent.py" semantic-kernel
cd "$folder"
HOME="$folder" CREWAI_DISABLE_TELEMETRY=true OTEL_SDK_DISABLED=true crew/bin/python agent.py crewai >out 2>log \
  || { status=$?; cat out log >&2; exit $status; }
grep '^crewai: ' out
